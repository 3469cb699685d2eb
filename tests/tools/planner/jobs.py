"""Command lines that several tests plan."""

from __future__ import annotations

from mindspeed_dsa.tools.planner import arguments, plan
from mindspeed_dsa.tools.planner.devices import device
from mindspeed_dsa.tools.planner.job import Job
from mindspeed_dsa.tools.planner.plan import Plan

DEEPSEEK = (
    "pretrain_gpt.py --seq-length 4096 --micro-batch-size 1 --global-batch-size 4096 --bf16 "
    "--pipeline-model-parallel-size 16 --decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 32 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-fused-dsa "
    "--dsa-indexer-loss-coeff 0.01 --moe-grouped-gemm"
)
DENSE = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --vocab-size 32000 --bf16 "
    "--seq-length 4096 --micro-batch-size 2"
)
EXAMPLE = "pretrain_dsa.py --bf16 --use-distributed-optimizer"


def deepseek(more: str = "", devices: int | None = 512) -> Job:
    """Return DeepSeek-V3.2's job."""
    return arguments.job_of(f"{DEEPSEEK} {more}".split(), devices, "deepseek-v3.2")


def example(more: str = "", devices: int | None = None, any_layout: bool = False) -> Job:
    """Return the example job."""
    return arguments.job_of(f"{EXAMPLE} {more}".split(), devices, any_layout=any_layout)


def planned(job: Job) -> Plan:
    """Plan a job on H200s."""
    return plan.make(job, device("h200"))
