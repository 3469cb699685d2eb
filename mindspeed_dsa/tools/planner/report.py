"""Text report of a plan."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.planner import communication, sizes
from mindspeed_dsa.tools.planner.job import Job
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import FITS, TIGHT, Plan

_SHOWN = 6
_WIDTH = 110
_ZERO = "0.00"
_FEW_MORE = 8
"""Largest factor of devices for which the report suggests more replicas."""


def text(plan: Plan, tokens_per_second: float | None = None) -> str:
    """Return the report for a terminal.

    Args:
        plan: finished plan.
        tokens_per_second: measured rate of the whole job; if given, the report includes its model FLOPs
            utilisation.
    """
    parts = [
        _head(plan),
        _of_ranks(plan),
        _communication(plan),
        _work(plan, tokens_per_second),
        _assumptions(plan),
    ]
    return "\n\n".join(parts)


def _head(plan: Plan) -> str:
    job, device, worst = plan.job, plan.device, plan.worst
    training, allowed = job.training, device.memory - device.reserve
    reserve = f", of which {device.reserve:g} in reserve" if device.reserve else ""
    over = worst.total / GIB - allowed
    room = {
        FITS: f"{-over:.1f} to spare",
        TIGHT: f"warning: {over:.1f} too much with the allocator's share and the reserve",
    }
    lines = [
        f"{job.layout} on {job.layout.devices} x {device.name}: {plan.verdict}",
        (
            f"memory: {worst.allocated / GIB:.1f} GiB allocated on pipeline rank {worst.rank}, the largest; "
            f"{worst.total / GIB:.1f} with the allocator's share"
        ),
        f"{device.memory:g} GiB of a device{reserve}: {room.get(plan.verdict, too_much(plan))}",
        f"one replica needs {_devices(plan.least)}{_fitting(plan)}",
        *_on_hosts(plan),
        *_selecting(job),
        (
            f"step: {training.batch} x {training.sequence} tokens, {job.microbatches} "
            f"microbatch{'es' * (job.microbatches > 1)} of {training.micro} per data parallel rank"
        ),
        *_padded(job),
    ]
    return "\n".join(lines)


def too_much(plan: Plan) -> str:
    """Return text that names the missing memory of a plan: excess GiB on the device, or too small a host."""
    excess = plan.worst.total / GIB - (plan.device.memory - plan.device.reserve)
    host = "a node's host has no room" if plan.node_host > plan.device.host_memory * GIB else ""
    return "; ".join(filter(None, [f"{excess:.1f} too much" if excess > 0 else "", host]))


def _fitting(plan: Plan) -> str:
    """Return text with the smallest number of devices on which the layout fits, if at most 8x the job's."""
    devices = plan.job.layout.devices
    if plan.fits or plan.fitting is None or plan.fitting > _FEW_MORE * devices:
        return ""
    return f"; this layout fits from {_devices(plan.fitting)} on"


def _on_hosts(plan: Plan) -> list[str]:
    """Return the line about host memory, if a feature uses it."""
    if not plan.node_host:
        return []
    ranks, limit = min(plan.device.host_devices, plan.job.layout.devices), plan.device.host_memory
    verdict = "of" if plan.node_host <= limit * GIB else "which does NOT fit the"
    largest = max(each.host for each in plan.ranks) / GIB
    node = f"{plan.node_host / GIB:,.1f} for {ranks} of a node, {verdict} {limit:,.0f} assumed"
    return [f"host: {largest:.1f} GiB a rank, {node}"]


def _padded(job: Job) -> list[str]:
    """Return a line about padding, if context and sequence parallelism do not divide the sequence length."""
    tokens, rows = job.training.sequence, job.sequence - job.training.sequence
    if not rows:
        return []
    words = (
        f"sequences of {tokens} tokens are padded to {job.sequence} rows, which the ranks divide: {rows} of "
        f"them ({100 * rows / job.sequence:.2g} %) are computed and count nothing"
    )
    return [words]


def _selecting(job: Job) -> list[str]:
    """Return a line about the layers that have an indexer, if layers share selections."""
    sharing = job.model.sharing
    if not (job.model.sparse and sharing.is_on):
        return []
    return [f"keys are selected in {sharing.words(job.model.layers)}; the others attend to the same keys"]


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"


def shown(columns: Sequence[tuple[str, ...]], needs: Sequence[float]) -> list[tuple[str, list[int]]]:
    """Group ranks with equal columns for the table. With more than six groups, keep first, last and largest.

    Args:
        columns: cells of each rank.
        needs: bytes of each rank.

    Returns:
        Title and ranks of each column.
    """
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, column in enumerate(columns):
        ranks.setdefault(column, []).append(rank)
    groups = list(ranks.values())
    if len(groups) > _SHOWN:
        ends = (groups[0], groups[-1])
        largest = sorted(groups, key=lambda alike: -needs[alike[0]])
        wanted = [*ends, *(alike for alike in largest if alike not in ends)]
        groups = sorted(wanted[:_SHOWN])
    return [(_named(alike), alike) for alike in groups]


def _named(ranks: Sequence[int]) -> str:
    """Return the names of ranks: ``rank 0``, ``ranks 1-14`` or ``ranks 1-6, 8``."""
    return f"rank{'s' * (len(ranks) > 1)} {runs(ranks)}"


def runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as ``1-6, 8``."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in groups)


def _of_ranks(plan: Plan) -> str:
    """Return the memory table; ranks with the same values share a column."""
    kept = {name: [value / GIB for value in values] for name, values in memory_rows(plan).items()}
    kept["sum"] = [rank.total / GIB for rank in plan.ranks]
    cells = {name: [f"{value:.2f}" for value in values] for name, values in kept.items()}
    if any(rank.host for rank in plan.ranks):
        cells["on the host"] = [f"{rank.host / GIB:.2f}" for rank in plan.ranks]
    cells["parameters, millions"] = [f"{sum(rank.numbers.values()) / 1e6:,.2f}" for rank in plan.ranks]
    cells["microbatches in flight"] = ["+".join(map(str, rank.in_flight)) for rank in plan.ranks]
    if plan.job.features.split:
        cells["weight gradients waiting"] = ["+".join(map(str, rank.waiting)) for rank in plan.ranks]
    # Compared as printed: ranks that differ only below two digits share a column.
    columns = list(zip(*cells.values(), strict=True))
    columns_shown = shown(columns, [rank.total for rank in plan.ranks])
    rows = [("memory, GiB", *(name for name, _ in columns_shown))]
    for name, row_cells in cells.items():
        said = [row_cells[ranks[0]] for _, ranks in columns_shown]
        # Leave out rows that are zero on all shown ranks.
        if any(cell != _ZERO for cell in said):
            rows.append((name, *("-" if cell == _ZERO else cell for cell in said)))
    left = len(plan.ranks) - sum(len(ranks) for _, ranks in columns_shown)
    omitted = [f"{left} other ranks need less than the largest of these"] if left else []
    return "\n".join([*aligned(rows), *omitted])


def memory_rows(plan: Plan) -> dict[str, list[float]]:
    """Return a dict from row of the report's memory table to the bytes on each pipeline rank."""
    rows: dict[str, list[float]] = {
        "weights": [rank.weights + rank.buffers for rank in plan.ranks],
        "gradients": [rank.gradients for rank in plan.ranks],
        "master weights": [rank.masters for rank in plan.ranks],
        "moments": [rank.moments for rank in plan.ranks],
    }
    for part in _union([rank.activations for rank in plan.ranks]):
        rows[f"activations: {part}"] = [rank.activations.get(part, 0.0) for rank in plan.ranks]
    # If the optimizer step is the peak, activations are freed then, and only the rest counts.
    rows["temporary"] = [rank.beside - rank.kept if rank.beside > rank.kept else 0.0 for rank in plan.ranks]
    rows["allocator"] = [rank.allocator for rank in plan.ranks]
    return rows


def _union(tables: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _communication(plan: Plan) -> str:
    busiest = max(plan.transfers, key=lambda own: sum(each.nbytes for each in own))
    sums = communication.by_group(busiest)
    if not sums:
        return "communication: none"
    # Sums below 5 MB would be printed as 0.00 GB.
    groups = ", ".join(
        f"{group} {nbytes / 1e9:.2f}" for group, nbytes in sorted(sums.items()) if nbytes >= 5e6
    )
    return (
        f"received in a step, pipeline rank {plan.transfers.index(busiest)}, GB: "
        f"{sum(sums.values()) / 1e9:.2f}{f' ({groups})' if groups else ''}"
    )


def _work(plan: Plan, tokens_per_second: float | None) -> str:
    numbers = sizes.by_part(sizes.model_weights(plan.job.model))
    per_token = {part: flops / plan.job.training.sequence for part, flops in plan.flops.items()}
    rows: list[tuple[str, ...]] = [("model", "parameters, millions", "GFLOP of a token")]
    for part in dict.fromkeys([*numbers, *per_token]):
        figures = (numbers.get(part, 0.0) / 1e6, per_token.get(part, 0.0) / 1e9)
        rows.append((part, *map(_number, figures)))
    sums = (sum(numbers.values()) / 1e6, sum(per_token.values()) / 1e9)
    rows.append(("sum", *map(_number, sums)))
    step = [("time of a step", "ms", "share")]
    for part, value in sorted(plan.time.parts.items(), key=lambda each: -each[1]):
        if value >= 5e-4 * plan.time.total:
            step.append((part, f"{1e3 * value:.1f}", f"{value / plan.time.total:.1%}"))
    step.append(("sum", f"{1e3 * plan.time.total:.1f}", ""))
    low, high = plan.seconds_range
    rate, devices = plan.tokens_per_second, plan.job.layout.devices
    lines = [
        *_beside(aligned(rows), aligned(step)),
        "",
        (
            f"estimate: {duration(low)} to {duration(high)} s a step if the job is tuned; limited by "
            f"{plan.time.limit}"
        ),
        (
            f"in the middle {digits(rate)} tokens/s, {digits(rate / devices)} per device, model FLOPs "
            f"utilisation {plan.utilisation():.0%}"
        ),
    ]
    if tokens_per_second is not None:
        share = plan.utilisation(tokens_per_second)
        lines.append(f"at {tokens_per_second:,.0f} tokens/s: model FLOPs utilisation {share:.1%}")
    return "\n".join(lines)


def digits(value: float) -> str:
    """Return a number with two digits, and zeros for the others."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.1f}" if rounded >= 1 else f"{rounded:.2g}"


def duration(seconds: float) -> str:
    """Return seconds with two digits, from 100 on without decimals."""
    return f"{seconds:.0f}" if seconds >= 100 else digits(seconds)


def _number(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.01 else f"{value:.1g}" if value else "-"


def _beside(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Return the lines of two tables side by side."""
    width = max(map(len, left)) + 6
    return [f"{a.ljust(width)}{b}".rstrip() for a, b in zip_longest(left, right, fillvalue="")]


def _assumptions(plan: Plan) -> str:
    device, job = plan.device, plan.job
    lines = [
        "assumed:",
        (
            f"  {device.tflops:g} TFLOP/s, of which matmuls reach {device.matmul:.0%} beside moving their "
            f"bytes, attention {device.attention:.0%}, sparse attention and indexer {device.sparse:.0%}"
        ),
        (
            f"  {device.link:g} GB/s between {device.node} devices, {device.network:g} GB/s beyond, "
            f"{device.host:g} GB/s to the host, {device.hbm:g} GB/s of memory"
        ),
        (
            f"  of these rates jobs reach {device.linking:.0%} between devices, {device.networking:.0%} "
            f"beyond, {device.moving:.0%} of memory"
        ),
        (
            f"  {device.host_experts:g} ms of the host for a layer with experts and a microbatch, "
            f"{device.host_dense:g} for a dense one"
        ),
        f"  tokens of the fullest rank's experts over the mean: {_imbalance(job)}",
    ]
    return "\n".join([*lines, *notes(job.notes)])


def _imbalance(job: Job) -> str:
    """Return the imbalance with its source."""
    if job.imbalances and job.layout.ep > 1:
        layers = [*job.kinds, *job.mtp_kinds]
        skews = [kind.skew for kind in layers if kind.experts]
        worst = max(range(len(layers)), key=lambda number: layers[number].skew) + 1
        return f"{min(skews):.2f} to {max(skews):.2f} as recorded, the most in layer {worst}"
    given = not job.balancing or job.layout.ep == 1
    return f"{job.skew:g}" if given else f"{job.skew:g}, usual with {job.balancing}; --imbalance replaces it"


def notes(said: Iterable[str]) -> list[str]:
    """Return the notes, wrapped to the report's width."""
    return [line for each in said for line in textwrap.wrap(f"note: {each}", _WIDTH, subsequent_indent="  ")]
