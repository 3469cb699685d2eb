"""Search for the fastest layouts that fit on a number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.planner import command_lines, layouts, memory, plan, report
from mindspeed_dsa.tools.planner.devices import Device
from mindspeed_dsa.tools.planner.job import Features, Job, Layout, Training
from mindspeed_dsa.tools.planner.memory import GIB, RankMemory
from mindspeed_dsa.tools.planner.plan import ALLOCATOR, FITS, TIGHT, TOO_LARGE, Plan

MEASURES = (
    "as given",
    "recompute norms and activation functions",
    "and swap attention",
    "full recompute",
)
"""Memory-saving features, tried in this order until a layout fits; then with the optimizer on the host."""
FULL = len(MEASURES) - 1
_REFINED = 10
MICRO = (1, 2, 4)
LEAST_ROWS = 1024
"""Fewest tokens of a sequence per rank; with fewer, matrix products are too small to be efficient."""


@dataclass(frozen=True)
class Found:
    """One layout found by a search.

    Attributes:
        plan: plan of the layout.
        measures: memory-saving features that the layout needs to fit.
    """

    plan: Plan
    measures: str


def search(
    job: Job,
    device: Device,
    best: int = 5,
    allocator: float = ALLOCATOR,
    micro: Sequence[int] = MICRO,
) -> list[Found]:
    """Return the layouts with the shortest estimated step time.

    Args:
        job: job to search a layout for; its model, batch, features and number of devices are kept.
        device: device with its memory and rates.
        best: number of layouts to return.
        allocator: assumed overhead of the allocator, as a share of the tensors' bytes.
        micro: micro-batch sizes to try.

    Returns:
        Layouts that fit, the fastest first; if none fits, tight ones.

    Raises:
        SettingsError: Megatron accepts no layout, or none fits; then names the one that needs least memory.
    """
    fitting: list[Found] = []
    lacking: list[tuple[tuple[float, float], Layout]] = []
    for candidate in candidates(job, device, micro):
        fitted = _fitted(candidate, device, allocator)
        if isinstance(fitted, Found):
            fitting.append(fitted)
        else:
            lacking.append((fitted, candidate.layout))
    if not fitting:
        said = " divides model, batch and sequence; use another number of devices or --global-batch-size"
        if lacking:
            (needed, node), layout = min(lacking, key=lambda each: each[0])
            said = f" fits {device.memory:g} GiB; the closest, {layout}, needs {needed / GIB:,.2f} GiB"
            if node:
                said += f" and {node / GIB:,.2f} of a node's host, with {device.host_memory:,g} assumed"
            said += ". Use more devices, or a smaller --global-batch-size or --seq-length"
        raise SettingsError(
            f"mindspeed_dsa plan: no layout of {job.layout.devices} {device.name}{said}"
            f"{f'; {pipelines}' if (pipelines := limits(job)) else ''}"
        )
    fitting = [layout_found for layout_found in fitting if layout_found.plan.fits] or fitting
    fitting.sort(key=lambda layout_found: layout_found.plan.time.total)
    # Quick plans rank the candidates; only the best ones are simulated event by event.
    refined = [
        Found(plan.make(layout_found.plan.job, device, allocator), layout_found.measures)
        for layout_found in fitting[: max(best, _REFINED)]
    ]
    return sorted(refined, key=lambda layout_found: layout_found.plan.time.total)[:best]


def limits(job: Job) -> str:
    """Return a note on pipeline layouts that are excluded because layers share selections; empty if none."""
    model = job.model
    if not (model.sparse and model.sharing.is_on):
        return ""
    most = len(model.selecting)
    return (
        "every chunk of a pipeline begins with a layer that selects keys, which "
        f"{model.sharing.words(model.layers)} do: a pipeline has {most} chunk{'s' * (most > 1)} at most"
    )


def candidates(job: Job, device: Device, micro: Sequence[int] = MICRO) -> Iterator[Job]:
    """Yield jobs with all valid layouts: for each combination of group sizes, the most even split of layers.

    If layers share selections, each chunk of a split begins with a layer that selects keys.
    """
    devices, model = job.layout.devices, job.model
    powers = [2**n for n in range(12)]
    # Tensor parallelism stays inside a node.
    for tp in (size for size in powers if size <= min(16, device.node)):
        for pp in (size for size in powers if size <= min(32, model.layers)):
            for cp in (size for size in powers if size <= 16):
                rows = job.training.sequence // (tp * cp)
                if devices % (tp * pp * cp) or (tp * cp > 1 and rows < LEAST_ROWS):
                    continue
                for ep in powers if model.experts else (1,):
                    for vpp in (2,) if job.layout.v_shaped else (1, 2):
                        for samples in micro:
                            candidate = _candidate(job, (tp, pp, cp, ep, vpp), samples)
                            if candidate is not None:
                                yield candidate


def _candidate(job: Job, sizes: tuple[int, int, int, int, int], micro: int) -> Job | None:
    tp, pp, cp, ep, vpp = sizes
    devices = job.layout.devices
    # Virtual stages need a pipeline.
    if vpp > 1 and pp == 1:
        return None
    layout = Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=ep,
        cp=cp,
        dp=devices // (tp * pp * cp),
        sequence=tp > 1,
        group=pp,
        v_shaped=job.layout.v_shaped,
        cp_algorithm=job.layout.cp_algorithm,
    )
    if devices % layouts.least_devices(layout):
        return None
    training, model = replace(job.training, micro=micro), job.model.padded(tp)
    for split in (layout, *layouts.uneven(layout, model)):
        made = replace(job, layout=split, training=training, model=model)
        if made.microbatches and layouts.works(made):
            return made
    return None


def _fitted(job: Job, device: Device, allocator: float) -> Found | tuple[float, float]:
    """Return the plan with the cheapest memory-saving features with which it fits.

    If it does not fit with all of them, return the bytes of a device that it then needs, and of a node's host
    if those are too many, else 0.
    """
    tried = [(host, measure) for host in (False, True) for measure in range(len(MEASURES))]
    # If even all measures together are not enough, none of them needs a try.
    ranks = memory.of_job(_with(job, *tried[-1]), allocator)
    least, node = _worst(ranks), plan.on_node(ranks, job, device)
    shortage = least.total, node if node > device.host_memory * GIB else 0.0
    if plan.verdict(least, device) == TOO_LARGE:
        return shortage
    tight = None
    for host, measure in tried:
        other = _with(job, host, measure)
        ranks = memory.of_job(other, allocator)
        verdict = plan.verdict(_worst(ranks), device)
        if verdict == TOO_LARGE or plan.on_node(ranks, other, device) > device.host_memory * GIB:
            continue
        if verdict == TIGHT and tight is not None:
            continue
        words = [MEASURES[measure]] if measure else []
        words += ["optimizer on the host"] if host and not job.features.swap_optimizer else []
        fitted = Found(plan.make(other, device, allocator, quick=True), "; ".join(words))
        if verdict == FITS:
            return fitted
        tight = fitted
    return tight or shortage


def _worst(ranks: Sequence[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda each: each.total)


def _with(job: Job, host: bool, measure: int) -> Job:
    return replace(job, features=_features(job, measure, host), training=_training(job, measure))


def _features(job: Job, measure: int, host: bool) -> Features:
    features = job.features
    if 1 <= measure <= 2:
        features = replace(features, recompute_norm=True, recompute_act=True)
        features = replace(features, swap_attention=features.swap_attention or measure == 2)
    elif measure == FULL:
        features = replace(
            features, recompute_norm=False, recompute_act=False, swap_attention=False, swap_auto=False
        )
    if host:
        # --swap-optimizer excludes the other ways to save memory of the optimizer.
        features = replace(features, swap_optimizer=True, reuse=False, virtual=())
    return features


def _training(job: Job, measure: int) -> Training:
    return replace(job.training, full=-1, full_group=1, modules=()) if measure == FULL else job.training


def text(fastest: list[Found], given: Sequence[str]) -> str:
    """Return the table of layouts, each with its command line.

    Args:
        fastest: result of :func:`search`.
        given: command line of the original job, script first if there is one.
    """
    rows = [("layout", "micro", "step [s]", "tokens/s", "MFU", "GiB", "host GiB", "limited by")]
    for item in fastest:
        planned = item.plan
        layout = planned.job.layout
        ends = "".join(
            f" {name} {count}" for name, count in (("first", layout.first), ("last", layout.last)) if count
        )
        if layout.stages:
            ends = f" layers {'+'.join(str(stage.count('t')) for stage in layout.stages)}"
        rows.append(
            (
                f"{layout}{ends}",
                str(planned.job.training.micro),
                " to ".join(map(report.duration, planned.seconds_range)),
                report.digits(planned.tokens_per_second),
                f"{planned.utilisation():.0%}",
                f"{planned.worst.total / GIB:.1f}",
                f"{max(item.host for item in planned.ranks) / GIB:.1f}",
                planned.time.limit,
            )
        )
    head, *lines = aligned(rows)
    device = fastest[0].plan.device
    all_ranks = fastest[0].plan.job.layout.devices
    ranks = min(device.host_devices, all_ranks)
    shown = [
        f"{all_ranks} x {device.name}, {fastest[0].plan.verdict}",
        f"{device.memory:g} GiB of a rank, {device.reserve:g} in reserve",
        f"{device.host_memory:g} GiB of the host of {ranks} rank{'s' * (ranks > 1)}, assumed",
    ]
    shown = ["; ".join(shown), head]
    for line, item in zip(lines, fastest, strict=True):
        shown += [line, *command_lines.shown(command_lines.words_for(given, item.plan.job))]
    shown += report.notes(_near(fastest))
    said = dict.fromkeys([*fastest[0].plan.job.notes, *(limits(item.plan.job) for item in fastest)])
    return "\n".join([*shown, *report.notes(filter(None, said))])


def _near(found: Sequence[Found]) -> list[str]:
    """Return a note on layouts that are nearer to the first than the planner can tell; empty without any."""
    first = found[0].plan.time.total
    number = sum(item.plan.time.total <= plan.SPREAD * first for item in found)
    if number < 2:
        return []
    words = (
        f"the step times of the first {number} rows differ by less than a factor of {plan.SPREAD:g}, which "
        "is less than the planner can tell: measure these layouts"
    )
    return [words]
