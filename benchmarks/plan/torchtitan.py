"""Plan of the example's TorchTitan job on 128 dies, compared with the article's figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mindspeed_dsa.tools.planner import devices, plan, report, torchtitan
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import Plan

EXAMPLE = "examples/torchtitan_job/deepseek_v32.toml"
DEVICES, DEVICE, CARDS = 128, "a3", 64
PUBLISHED = 29
"""Tokens per second and card in the article."""
DENSE = 18e9
"""Bytes of dense weights and gradients in the article, without FSDP2."""


def planned(whole: bool) -> Plan:
    """Plan the job; ``whole``: gradients stay whole until the last microbatch, as in torch's pipelines."""
    file = Path(__file__).parents[2] / EXAMPLE
    job = torchtitan.job_of([str(file)], DEVICES, None, None)
    assert job.sharding is not None
    job = replace(job, sharding=replace(job.sharding, whole=whole))
    return plan.make(job, devices.device(DEVICE))


def command() -> str:
    """Return the command that makes the plan, as a block of a page."""
    return f"```\npython -m mindspeed_dsa plan --devices {DEVICES} --device {DEVICE} -- {EXAMPLE}\n```"


def dense(found: Plan, shards: int) -> tuple[float, float]:
    """Return GB of dense weights and gradients of the two pipeline ranks, divided over ``shards``."""
    sizes = [
        sum(count for part, count in rank.numbers.items() if part != "routed experts") for rank in found.ranks
    ]
    low, high = sorted(8 * size / shards / 1e9 for size in sizes)
    return low, high


def rows(found: Plan) -> dict[str, float]:
    """Return GiB by part of the rank with the largest memory."""
    names = {
        "weights": found.worst.weights,
        "gradients": found.worst.gradients,
        "activations": found.worst.kept,
        "temporary": found.worst.beside - found.worst.kept,
        "allocator": found.worst.allocator,
        "sum": found.worst.total,
        "host": found.worst.host,
    }
    return {name: nbytes / GIB for name, nbytes in names.items()}


def block() -> str:
    """Return the generated part of the page."""
    return "\n".join([command(), "", *_table(_ENGLISH), "", *_sentences(), ""])


def chinese() -> str:
    """Return the generated part of the Chinese page."""
    return "\n".join([command(), "", *_table(_CHINESE), "", *_chinese_sentences(), ""])


_ENGLISH = {
    "head": "| GiB of the fullest rank, of {memory:g} | torch's pipelines | reduced in each microbatch |",
    "weights": "weights, fp32",
    "gradients": "gradients, fp32",
    "activations": "activations",
    "temporary": "gathered weights and other temporaries",
    "allocator": "allocator",
    "sum": "sum",
    "host": "moments on the host",
    "verdict": "verdict",
    plan.FITS: "fits",
    plan.TIGHT: "tight",
    plan.TOO_LARGE: "does NOT fit",
}
_CHINESE = {
    "head": "| 占用最多的 rank 的 GiB，设备共 {memory:g} | torch 的流水 | 每个 microbatch 都归约梯度 |",
    "weights": "权重，fp32",
    "gradients": "梯度，fp32",
    "activations": "激活",
    "temporary": "gather 到的权重和其他临时张量",
    "allocator": "分配器",
    "sum": "合计",
    "host": "主机上的动量",
    "verdict": "结论",
    plan.FITS: "放得下",
    plan.TIGHT: "勉强放得下",
    plan.TOO_LARGE: "放不下",
}


def _table(words: dict[str, str]) -> list[str]:
    whole, reduced = planned(True), planned(False)
    lines = [words["head"].format(memory=whole.device.memory), "| --- | ---: | ---: |"]
    pairs = zip(rows(whole).items(), rows(reduced).values(), strict=True)
    lines += [f"| {words[name]} | {first:.1f} | {second:.1f} |" for (name, first), second in pairs]
    return [*lines, f"| {words['verdict']} | {words[whole.verdict]} | {words[reduced.verdict]} |"]


def _figures() -> tuple[str, ...]:
    found = planned(False)
    step = found.job.training.batch * found.job.training.sequence / (PUBLISHED * CARDS)
    before, after = dense(found, 1), dense(found, found.job.shards)
    low, high = map(report.duration, found.seconds_range)
    return (
        *(f"{x:.0f}" for x in before),
        f"{DENSE / 1e9:.0f}",
        *(f"{x:.1f}" for x in after),
        low,
        high,
        f"{PUBLISHED}",
        report.duration(step),
    )


def _sentences() -> list[str]:
    least, most, article, shard, shards, low, high, rate, step = _figures()
    return [
        f"* **Dense weights and gradients** take {least} to {most} GB on a rank without FSDP2,",
        f"  and {shard} to {shards} GB with it. The article says about {article} GB without FSDP2,",
        "  as if TP divided all of them. Down projections, indexers and routers are on every TP rank.",
        f"* **Time.** The plan is {low} to {high} s a step for a tuned job.",
        f"  The article's {rate} tokens/s of a card are {step} s.",
    ]


def _chinese_sentences() -> list[str]:
    least, most, article, shard, shards, low, high, rate, step = _figures()
    dense_parts = (
        f"* **稠密部分的权重和梯度**：不用 FSDP2 时每个 rank {least} 到 {most} GB，",
        f"用了以后 {shard} 到 {shards} GB。",
        f"文章写的是不用 FSDP2 时约 {article} GB，那是假定 TP 切分了全部权重；",
        "降维投影、indexer 和 router 其实在每个 TP rank 上都有一份。",
    )
    time_parts = (
        f"* **时间**：对调优过的作业，规划是每步 {low} 到 {high} s；",
        f"文章的每卡 {rate} token/s 相当于每步 {step} s。",
    )
    return ["".join(dense_parts), "".join(time_parts)]
