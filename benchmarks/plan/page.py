"""The page's plan of DeepSeek-V3.2 on 512 devices, what each feature changes in it, and its picture.

``python -m benchmarks.plan.page`` writes both into ``docs/``.
"""

from __future__ import annotations

from pathlib import Path

from mindspeed_dsa.tools.planner import arguments, plan, report, search, timing
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import Plan

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- plan:begin -->\n", "<!-- plan:end -->"
DEVICES, DEVICE, MODEL = 512, "h200", "deepseek-v3.2"
FLAGS = (
    "pretrain_gpt.py --seq-length 4096 --micro-batch-size 1 --global-batch-size 8192 --bf16 "
    "--pipeline-model-parallel-size 16 --decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 8 "
    "--context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--moe-grouped-gemm --use-fused-dsa --dsa-indexer-loss-coeff 0.01"
)
FITTING = (
    "--moe-permute-fusion --recompute-activation-function --recompute-norm --swap-optimizer "
    "--moe-alltoall-overlap-comm"
)
FEATURES = (
    "--reuse-fp32-param",
    "--swap-optimizer",
    "--virtual-optimizer all",
    "--recompute-activation-function",
    "--recompute-norm",
    "--swap-attention",
    "--moe-permute-fusion",
    "--moe-alltoall-overlap-comm",
    "--moe-batch-overlap",
    "--cp-keep-gathered",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--expert-model-parallel-size 32",
    "--no-use-distributed-optimizer --use-torch-fsdp2",
    "--no-use-distributed-optimizer --use-torch-fsdp2 --fsdp2-shard-experts",
    (
        "--no-use-distributed-optimizer --use-torch-fsdp2 --fsdp2-shard-experts "
        "--expert-model-parallel-size 32"
    ),
    "--context-parallel-size 1",
    "--context-parallel-size 1 --no-use-dsa-absorb",
    "--context-parallel-size 1 --no-use-fused-dsa",
    (
        "--context-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel --moe-tp-extend-ep "
        "--expert-model-parallel-size 4"
    ),
    FITTING,
)


def planned(more: str = "") -> Plan:
    """With more flags."""
    job = arguments.job_of(f"{FLAGS} {more}".split(), DEVICES, MODEL)
    return plan.make(job, timing.device(DEVICE))


def tables() -> str:
    """The plan in short, and a row for each feature."""
    before = planned()
    lines = [_sentence(before), ""]
    lines += ["| With | Memory [GiB] | Host [GiB] | Step [s] | Mostly |", "| --- | --- | --- | --- | --- |"]
    for flags in FEATURES:
        after = planned(flags)
        found = search.difference(flags, before, after)
        moved = max({**found.memory, "": 0.0}.items(), key=lambda each: abs(each[1]))
        slower = max(found.seconds.items(), key=lambda each: abs(each[1]))
        mostly = f"{moved[0]} {moved[1] / GIB:+.1f} GiB" if abs(moved[1]) > 0.05 * GIB else ""
        mostly += f"{', ' if mostly else ''}{slower[0]} {slower[1]:+.1f} s" if abs(slower[1]) > 0.05 else ""
        host = f"{found.host / GIB:+.1f}" if found.host else ""
        sums = f"{found.memory_sum / GIB:+.1f} | {host} | {found.seconds_sum:+.2f}"
        lines.append(f"| `{flags}` | {sums} | {mostly} |")
    return "\n".join([*lines, "", f"With the last row: {_sentence(planned(FITTING))}"])


def _sentence(found: Plan) -> str:
    verdict = "fits" if found.fits else "does not fit"
    return (
        f"{found.job.layout}: {found.worst.total / GIB:.0f} GiB on pipeline rank {found.worst.rank}, which "
        f"{verdict} {found.device.memory:g} GiB; {found.time.total:.1f} s a step, "
        f"{found.tokens_per_second:,.0f} tokens/s, {found.utilisation():.0%} of the devices' FLOPs, limited "
        f"by {found.time.limit}."
    )


def write() -> None:
    """Page and picture."""
    page = DOCS / "planner.md"
    head, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{head}{BEGIN}{tables()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    report.draw(DOCS / "images" / "plan-deepseek-v3.2.png", planned(FITTING))


if __name__ == "__main__":
    write()
