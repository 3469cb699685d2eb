#!/bin/bash
# Train on several nodes under Slurm: one torchrun on each node, which starts the ranks of the node.
#   sbatch examples/launch/slurm.sh pretrain_gpt.py FLAGS...
# COMMON is a folder that all nodes see: checkpoints, records and the report of a run lie there.
#SBATCH --job-name=dsa
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --signal=TERM@120

set -euo pipefail
: "${COMMON:?name a folder that all nodes see}"
RANKS_PER_NODE=${RANKS_PER_NODE:-8}
RESTARTS=${RESTARTS:-3}
# Without a pipe to head, whose end would end a scontrol that has more names, and this script with it.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / RANKS_PER_NODE))}
# Threads that wait do not spin: ranks of a node share its cores.
export OMP_WAIT_POLICY=passive
# Each attempt has a store of its own; one that all share loses attempts (docs/design/survival.md).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Megatron-LM asks for it with tensor or context parallelism before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=1

# Since Slurm 22.05 srun takes no cores over from sbatch: without them a torchrun and its ranks share one.
srun --kill-on-bad-exit=1 --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "$RESTARTS" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "${nodes%%$'\n'*}:${PORT:-29500}" \
    "$@" \
    --save "$COMMON/checkpoints" --load "$COMMON/checkpoints" --whole-checkpoints \
    --record-collectives "$COMMON/collectives" --tensorboard-dir "$COMMON/tensorboard"
