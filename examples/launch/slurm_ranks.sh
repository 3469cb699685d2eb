#!/bin/bash
# Train under Slurm without torchrun: srun starts every rank, and this script names it to torch.
#   srun --kill-on-bad-exit=1 --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 --cpus-per-task 12 \
#       examples/launch/slurm_ranks.sh pretrain_gpt.py FLAGS...
# With --kill-on-bad-exit=1 a rank that fails or is killed ends the job; without it the others may wait for their
# groups' time-out. Slurm starts none again.

set -euo pipefail
# Of the step: it may have fewer nodes than the allocation that it runs in.
nodes=$(scontrol show hostnames "$SLURM_STEP_NODELIST")
export MASTER_ADDR=${nodes%%$'\n'*} MASTER_PORT=${PORT:-29500}
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
# What torchrun would set, and what checks of a node's surroundings ask for.
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_STEP_NUM_NODES))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}} OMP_WAIT_POLICY=passive
export CUDA_DEVICE_MAX_CONNECTIONS=1

exec python "$@"
