"""Plans on pages: DeepSeek-V3.2 and GLM-5.2 on 512 devices, the effect of each feature, and a picture.

``python -m benchmarks.plan.page`` writes them into ``docs/``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.plan import published, torchtitan
from mindspeed_dsa.tools.planner import (
    arguments,
    command_lines,
    devices,
    differences,
    picture,
    plan,
    report,
    routing,
)
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import Plan

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- plan:begin -->\n", "<!-- plan:end -->"
DEVICES, DEVICE, MODEL = 512, "h200", "deepseek-v3.2"
FLAGS = (
    "pretrain_gpt.py --seq-length 4096 --micro-batch-size 1 --global-batch-size 8192 --bf16 "
    "--pipeline-model-parallel-size 16 --decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 8 "
    "--context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --use-fused-dsa --dsa-indexer-loss-coeff 0.01"
)
FITTING = (
    "--moe-permute-fusion --recompute-activation-function --recompute-norm --swap-optimizer "
    "--swap-attention auto --moe-alltoall-overlap-comm"
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


GLM = (
    "pretrain_gpt.py --seq-length 8192 --micro-batch-size 1 --global-batch-size 2048 --bf16 --use-fused-dsa "
    "--dsa-model glm-5.2 --dsa-indexer-loss-coeff 0.01 --dsa-indexer-use-sparse-loss "
    "--use-distributed-optimizer --pipeline-model-parallel-size 8 --decoder-first-pipeline-num-layers 2 "
    "--decoder-last-pipeline-num-layers 4 --expert-model-parallel-size 16 --context-parallel-size 8 "
    "--moe-token-dispatcher-type alltoall --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1"
)


def planned(more: str = "", flags: str = FLAGS, model: str = MODEL) -> Plan:
    """Plan a job with additional flags."""
    job = arguments.job_of(f"{flags} {more}".split(), DEVICES, model)
    return plan.make(job, devices.device(DEVICE))


def blocks() -> dict[str, list[str]]:
    """Return generated blocks by page, in the order of the page."""
    glm = f"{command(GLM, 'glm-5.2')}\n\n{_sentence(planned('', GLM, 'glm-5.2'))}\n"
    deepseek = f"{command(FLAGS, MODEL)}\n\n{tables()}\n"
    chinese = f"{command(GLM, 'glm-5.2')}\n\n{_sentence_in_chinese(planned('', GLM, 'glm-5.2'))}\n"
    return {
        "planner.md": [glm],
        "zh/planner.md": [chinese],
        "design/planner.md": [deepseek, constants()],
        "design/glm-5.md": [glm],
        "hosts/torchtitan.md": [torchtitan.block()],
        "zh/torchtitan.md": [torchtitan.chinese()],
    }


def constants() -> str:
    """Return the table of a device's constants."""
    lines = ["| Constant | Value | Meaning | Source |", "| --- | ---: | --- | --- |"]
    for name, constant in devices.CONSTANTS.items():
        value = getattr(devices.DEVICES[DEVICE], name)
        lines.append(f"| `{name}` | {value:g} | {constant.meaning} | {constant.source} |")
    for balancing, value in routing.IMBALANCES.items():
        lines.append(f"| `imbalance` | {value:g} | {_IMBALANCE} | {balancing} |")
    return "\n".join([*lines, ""])


_IMBALANCE = "expert tokens of the fullest rank over the mean of all ranks"


def command(flags: str, model: str) -> str:
    """Return the command that makes a plan, as a block of a page."""
    own = f"python -m mindspeed_dsa plan --config {model} --devices {DEVICES} --device {DEVICE} --".split()
    script, *words = flags.split()
    lines = command_lines.shown([*own[:-1], f"-- {script}", *words], indent="")
    text = "\n".join(lines).replace(f"'-- {script}'", f"-- {script}")
    return f"```\n{text}\n```"


def tables() -> str:
    """Return the plan's summary, and a row for each feature."""
    before = planned()
    lines = [_sentence(before), ""]
    lines += ["| With | Memory [GiB] | Host [GiB] | Step [s] | Mostly |", "| --- | --- | --- | --- | --- |"]
    for flags in FEATURES:
        after = planned(flags)
        changes = differences.difference(flags, before, after)
        moved = max({**changes.memory, "": 0.0}.items(), key=lambda each: abs(each[1]))
        slower = max(changes.seconds.items(), key=lambda each: abs(each[1]))
        mostly = f"{moved[0]} {moved[1] / GIB:+.1f} GiB" if abs(moved[1]) > 0.05 * GIB else ""
        mostly += f"{', ' if mostly else ''}{slower[0]} {slower[1]:+.1f} s" if abs(slower[1]) > 0.05 else ""
        host = f"{changes.host / GIB:+.1f}" if changes.host else ""
        sums = f"{changes.memory_sum / GIB:+.1f} | {host} | {changes.seconds_sum:+.2f}"
        lines.append(f"| `{flags}` | {sums} | {mostly} |")
    lines += ["", "With the flags of the last row, the plan is:", "", _sentence(planned(FITTING))]
    return "\n".join(lines)


def _sentence(found: Plan) -> str:
    return (
        f"The layout {found.job.layout} {'is ' * (found.verdict == plan.TIGHT)}{found.verdict}. "
        f"Pipeline rank {found.worst.rank} needs "
        f"{found.worst.total / GIB:.0f} GiB, the most of all ranks. "
        f"A device has {found.device.memory:g} GiB. "
        f"A step takes {_range(found)} s (in the middle {report.digits(found.tokens_per_second)} tokens/s, "
        f"{found.utilisation():.0%} of the devices' peak FLOPs). "
        f"The longest part of the step is {found.time.limit}."
    )


def _range(found: Plan) -> str:
    return " to ".join(map(report.duration, found.seconds_range))


def _sentence_in_chinese(found: Plan) -> str:
    verdicts = {plan.FITS: "放得下", plan.TIGHT: "勉强放得下", plan.TOO_LARGE: "放不下"}
    return (
        f"{found.job.layout}：{verdicts[found.verdict]}，占用最多的是流水 rank {found.worst.rank}，"
        f"{found.worst.total / GIB:.0f} GiB，设备共 {found.device.memory:g} GiB；"
        f"每步 {_range(found).replace(' to ', ' 到 ')} s，"
        f"中间值 {report.digits(found.tokens_per_second)} token/s，"
        f"为设备 FLOPs 的 {found.utilisation():.0%}，瓶颈是 {found.time.limit}。"
    )


def filled(text: str, wanted: list[str]) -> str:
    """Return a page's text with its marked blocks replaced."""
    head, *rest = text.split(BEGIN)
    if len(rest) != len(wanted):
        raise ValueError(f"{len(rest)} blocks are marked, and there are {len(wanted)}")
    parts = (f"{BEGIN}{own}{END}{after.partition(END)[2]}" for own, after in zip(wanted, rest, strict=True))
    return "".join([head, *parts])


def write() -> None:
    """Write pages and picture."""
    for name, wanted in blocks().items():
        page = DOCS / name
        page.write_text(filled(page.read_text(encoding="utf-8"), wanted), encoding="utf-8")
    published.write()
    picture.draw(DOCS / "images" / "plan-deepseek-v3.2.png", planned(FITTING))


if __name__ == "__main__":
    write()
