#!/bin/bash
# Train under Slurm without torchrun: srun starts every rank, and this script names it to torch.
#   srun --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 examples/launch/slurm_ranks.sh pretrain_gpt.py FLAGS...
# A rank that ends, ends the job; Slurm starts none again.

set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${PORT:-29500}
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
# What torchrun would set, and what checks of a node's surroundings ask for.
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}} OMP_WAIT_POLICY=passive
export CUDA_DEVICE_MAX_CONNECTIONS=1

exec python "$@"
