"""A plan in words, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs.metrics import pyplot_for_files
from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.planner import communication, sizes
from mindspeed_dsa.tools.planner.job import Job
from mindspeed_dsa.tools.planner.memory import GIB, RankMemory
from mindspeed_dsa.tools.planner.plan import Plan

_SHOWN = 16


def text(plan: Plan, tokens_per_second: float | None = None) -> str:
    """Everything, for a terminal.

    Args:
        plan: made.
        tokens_per_second: of the whole job, measured elsewhere; its utilisation is printed beside.
    """
    parts = [
        _head(plan),
        _parameters(plan),
        _memory(plan),
        _communication(plan),
        _work(plan, tokens_per_second),
    ]
    return "\n\n".join([*parts, _assumptions(plan)])


def _head(plan: Plan) -> str:
    job, device = plan.job, plan.device
    training = job.training
    fitting = f"this layout fits from {_devices(plan.fitting or 0)} on"
    if plan.fitting is None:
        fitting = "no number of replicas of this layout fits"
    verdict = "fits" if plan.fits else "does NOT fit"
    return "\n".join(
        [
            (
                f"{job.layout} on {job.layout.devices} x {device.name} ({device.memory:g} GiB): {verdict}, "
                f"{plan.worst.total / GIB:.1f} GiB on pipeline rank {plan.worst.rank}"
            ),
            f"one replica needs {_devices(plan.least)}; {fitting}",
            *_selecting(job),
            (
                f"step: {training.batch} x {training.sequence} tokens, {job.microbatches} "
                f"microbatch{'es' * (job.microbatches > 1)} of {training.micro} per data parallel rank"
            ),
            *_padded(job),
        ]
    )


def _padded(job: Job) -> list[str]:
    """Say what padding costs, where ranks do not divide a sequence."""
    tokens, rows = job.training.sequence, job.sequence - job.training.sequence
    if not rows:
        return []
    words = (
        f"sequences of {tokens} tokens are padded to {job.sequence} rows, which the ranks divide: {rows} of "
        f"them ({100 * rows / job.sequence:.2g} %) are computed and count nothing"
    )
    return [words]


def _selecting(job: Job) -> list[str]:
    """Say which layers have an indexer, where not all of them do."""
    sharing = job.model.sharing
    if not (job.model.sparse and sharing.is_on):
        return []
    return [f"keys are selected in {sharing.words(job.model.layers)}; the others attend to the same keys"]


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"


def shown(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """All ranks, or the first, the last and those that need most."""
    if len(ranks) <= _SHOWN:
        return list(ranks)
    heaviest = sorted(ranks, key=lambda each: -each.total)[: _SHOWN - 4]
    wanted = {0, 1, len(ranks) - 2, len(ranks) - 1, *(each.rank for each in heaviest)}
    return [each for each in ranks if each.rank in wanted]


def _parameters(plan: Plan) -> str:
    whole = sizes.by_part(sizes.model_weights(plan.job.model))
    ranks = shown(plan.ranks)
    rows = [("parameters, millions", "model", *(f"rank {each.rank}" for each in ranks))]
    for part, count in whole.items():
        own = (f"{each.numbers.get(part, 0.0) / 1e6:,.2f}" for each in ranks)
        rows.append((part, f"{count / 1e6:,.2f}", *own))
    totals = (f"{sum(each.numbers.values()) / 1e6:,.2f}" for each in ranks)
    return "\n".join(aligned([*rows, ("sum", f"{sum(whole.values()) / 1e6:,.2f}", *totals)]))


def memory_rows(plan: Plan) -> dict[str, list[float]]:
    """Bytes by row, for each rank of the plan."""
    rows: dict[str, list[float]] = {
        "weights": [each.weights + each.buffers for each in plan.ranks],
        "gradients": [each.gradients for each in plan.ranks],
        "master weights": [each.masters for each in plan.ranks],
        "moments": [each.moments for each in plan.ranks],
    }
    for part in _union([each.activations for each in plan.ranks]):
        rows[f"activations: {part}"] = [each.activations.get(part, 0.0) for each in plan.ranks]
    rows["temporary"] = [each.beside - each.kept if each.beside > each.kept else 0.0 for each in plan.ranks]
    rows["allocator"] = [each.allocator for each in plan.ranks]
    return rows


def _union(tables: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _memory(plan: Plan) -> str:
    wanted = {each.rank for each in shown(plan.ranks)}
    rows = [("memory, GiB", *(f"rank {rank}" for rank in sorted(wanted)))]
    for name, values in memory_rows(plan).items():
        if any(values):
            own = (f"{value / GIB:.2f}" for rank, value in enumerate(values) if rank in wanted)
            rows.append((name, *own))
    chosen = [each for each in plan.ranks if each.rank in wanted]
    rows.append(("sum", *(f"{each.total / GIB:.2f}" for each in chosen)))
    rows.append(("microbatches in flight", *("+".join(map(str, each.in_flight)) for each in chosen)))
    if plan.job.features.split:
        rows.append(("weight gradients waiting", *("+".join(map(str, each.waiting)) for each in chosen)))
    if any(each.host for each in plan.ranks):
        rows.append(("on the host", *(f"{each.host / GIB:.2f}" for each in chosen)))
    return "\n".join(aligned(rows))


def _communication(plan: Plan) -> str:
    busiest = max(plan.transfers, key=lambda own: sum(each.nbytes for each in own))
    rank = plan.transfers.index(busiest)
    found: dict[tuple[str, str], float] = {}
    for each in busiest:
        key = (each.group, each.collective)
        found[key] = found.get(key, 0.0) + each.nbytes
    if not found:
        return "communication: none"
    rows = [(f"received in a step, pipeline rank {rank}", "collective", "GB")]
    rows += [(group, kind, f"{nbytes / 1e9:.3f}") for (group, kind), nbytes in sorted(found.items())]
    sums = communication.by_group(busiest)
    return "\n".join(aligned([*rows, ("all", "", f"{sum(sums.values()) / 1e9:.3f}")]))


def _work(plan: Plan, tokens_per_second: float | None) -> str:
    per_token = {part: flops / plan.job.training.sequence for part, flops in plan.flops.items()}
    rows = [("work of a token, forward and backward", "GFLOP")]
    rows += [(part, f"{flops / 1e9:.2f}") for part, flops in per_token.items()]
    rows.append(("sum", f"{sum(per_token.values()) / 1e9:.2f}"))
    step = [("time of a step", "ms", "share")]
    for part, value in sorted(plan.time.parts.items(), key=lambda each: -each[1]):
        step.append((part, f"{1e3 * value:.1f}", f"{value / plan.time.total:.1%}"))
    step.append(("sum", f"{1e3 * plan.time.total:.1f}", ""))
    rate = plan.tokens_per_second
    lines = [
        *aligned(rows),
        "",
        *aligned(step),
        "",
        (
            f"estimate: {rate:,.0f} tokens/s, {rate / plan.job.layout.devices:,.1f} per device, model FLOPs "
            f"utilisation {plan.utilisation():.1%}; limited by {plan.time.limit}"
        ),
    ]
    if tokens_per_second is not None:
        share = plan.utilisation(tokens_per_second)
        lines.append(f"at {tokens_per_second:,.0f} tokens/s: model FLOPs utilisation {share:.1%}")
    return "\n".join(lines)


def _assumptions(plan: Plan) -> str:
    device, job = plan.device, plan.job
    lines = [
        "assumed:",
        (
            f"  {device.tflops:g} TFLOP/s, of which matmuls reach {device.matmul:.0%}, attention "
            f"{device.attention:.0%}, sparse attention and indexer {device.sparse:.0%}"
        ),
        (
            f"  {device.link:g} GB/s between {device.node} devices, {device.network:g} GB/s beyond, "
            f"{device.host:g} GB/s to the host, {device.hbm:g} GB/s of memory; no latencies"
        ),
        f"  tokens of the fullest rank's experts over the mean: {job.imbalance:g}",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in job.notes)])


def draw(path: Path, plan: Plan) -> bool:
    """Stacked bars with the device's limit, and one bar of a step.

    Args:
        path: PNG file.
        plan: made.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        pyplot = pyplot_for_files()
    except ModuleNotFoundError:
        return False
    figure, (memory, step) = pyplot.subplots(1, 2, figsize=(13, 6), width_ratios=(3, 1), layout="constrained")
    colours = pyplot.get_cmap("tab20").colors
    ranks = [str(each.rank) for each in plan.ranks]
    rows = {name: [value / GIB for value in values] for name, values in memory_rows(plan).items()}
    _stack(memory, ranks, {name: values for name, values in rows.items() if any(values)}, colours)
    memory.axhline(plan.device.memory, color="red", linestyle="--", label=f"{plan.device.name}'s memory")
    memory.set(title=f"{plan.job.layout} on {plan.job.layout.devices} {plan.device.name}", ylabel="GiB")
    memory.set_xlabel("pipeline rank")
    memory.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ordered = sorted(plan.time.parts.items(), key=lambda each: -each[1])
    _stack(step, ["step"], {name: [value] for name, value in ordered}, colours)
    step.set(title=f"{plan.time.total:.2f} s, {plan.utilisation():.0%} of the devices", ylabel="s")
    step.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
    return True


def _stack(axes: Any, names: list[str], rows: dict[str, list[float]], colours: Any) -> None:
    below = [0.0] * len(names)
    for index, (name, values) in enumerate(rows.items()):
        axes.bar(names, values, bottom=below, label=name, color=colours[index % len(colours)], width=0.8)
        below = [low + value for low, value in zip(below, values, strict=True)]
