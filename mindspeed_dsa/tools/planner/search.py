"""Layouts for a number of devices, the fastest that fit first, each with the flags that make it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.planner import command_lines, layouts, memory, plan, report
from mindspeed_dsa.tools.planner.job import Features, Job, Layout, Training
from mindspeed_dsa.tools.planner.memory import GIB, RankMemory
from mindspeed_dsa.tools.planner.plan import ALLOCATOR, FITS, TIGHT, TOO_LARGE, Plan
from mindspeed_dsa.tools.planner.timing import Device

MEASURES = (
    "as given",
    "recompute norms and activation functions",
    "and swap attention",
    "full recompute",
)
"""What is tried, in this order, until a layout fits; and each of them with the optimizer on the host."""
FULL = len(MEASURES) - 1
_REFINED = 10
MICRO = (1, 2, 4)
LEAST_ROWS = 1024
"""Rows of a sequence on a rank, below which matrix products are too thin to be worth a look."""


@dataclass(frozen=True)
class Found:
    """One layout of a search.

    Attributes:
        plan: its.
        measures: what it took to fit.
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
    """The best layouts by estimated step time.

    Args:
        job: its layout's number of devices is kept; its batch, its model and its features too.
        device: the limit, and the rates.
        best: how many.
        allocator: share that it is assumed to add.
        micro: sizes of micro-batches that are tried.

    Returns:
        layouts that fit; tight ones where none does.

    Raises:
        SettingsError: nothing fits, with what comes closest.
    """
    fitting: list[Found] = []
    closest: tuple[float, Job] | None = None
    for candidate in candidates(job, device, micro):
        found = _fitted(candidate, device, allocator)
        if isinstance(found, float):
            if closest is None or found < closest[0]:
                closest = (found, candidate)
            continue
        fitting.append(found)
    if not fitting:
        said = ""
        if closest is not None:
            said = f"; the closest, {closest[1].layout}, needs {closest[0] / GIB:.1f} GiB"
        raise SettingsError(
            f"mindspeed_dsa plan: no layout of {job.layout.devices} {device.name} fits {device.memory:g} GiB"
            f"{said}. Use more devices, or a smaller --global-batch-size or --seq-length"
            f"{f'; {pipelines}' if (pipelines := limits(job)) else ''}"
        )
    if any(each.plan.fits for each in fitting):
        fitting = [each for each in fitting if each.plan.fits]
    fitting.sort(key=lambda each: each.plan.time.total)
    refined = [
        Found(plan.make(each.plan.job, device, allocator), each.measures)
        for each in fitting[: max(best, _REFINED)]
    ]
    return sorted(refined, key=lambda each: each.plan.time.total)[:best]


def limits(job: Job) -> str:
    """Say which pipelines a search leaves out because layers share selections; empty if none."""
    model = job.model
    if not (model.sparse and model.sharing.is_on):
        return ""
    most = len(model.selecting)
    return (
        "every chunk of a pipeline begins with a layer that selects keys, which "
        f"{model.sharing.words(model.layers)} do: a pipeline has {most} chunk{'s' * (most > 1)} at most"
    )


def candidates(job: Job, device: Device, micro: Sequence[int] = MICRO) -> Iterator[Job]:
    """Layouts that divide everything; of those with the same sizes, the most even split of layers.

    Where layers share selections, each chunk of a split begins with one that selects.
    """
    devices, model = job.layout.devices, job.model
    powers = [2**n for n in range(12)]
    for tp in (size for size in powers if size <= min(16, device.node)):
        for pp in (size for size in powers if size <= min(32, model.layers)):
            for cp in (size for size in powers if size <= 16):
                rows = job.training.sequence // (tp * cp)
                if devices % (tp * pp * cp) or (tp * cp > 1 and rows < LEAST_ROWS):
                    continue
                for ep in powers if model.experts else (1,):
                    for vpp in (2,) if job.layout.v_shaped else (1, 2):
                        for samples in micro:
                            found = _candidate(job, (tp, pp, cp, ep, vpp), samples)
                            if found is not None:
                                yield found


def _candidate(job: Job, sizes: tuple[int, int, int, int, int], micro: int) -> Job | None:
    tp, pp, cp, ep, vpp = sizes
    devices = job.layout.devices
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


def _fitted(job: Job, device: Device, allocator: float) -> Found | float:
    """With the cheapest measures that make it fit, or the bytes it needs with all of them."""
    tried = [(host, measure) for host in (False, True) for measure in range(len(MEASURES))]
    least = _worst(memory.of_job(_with(job, *tried[-1]), allocator))
    if plan.verdict(least, device) == TOO_LARGE:
        return least.total
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
        found = Found(plan.make(other, device, allocator, quick=True), "; ".join(words))
        if verdict == FITS:
            return found
        tight = found
    return tight or least.total


def _worst(ranks: Sequence[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda each: each.total)


def _with(job: Job, host: bool, measure: int) -> Job:
    return replace(job, features=_features(job, measure, host), training=_training(job, measure))


def _features(job: Job, measure: int, host: bool) -> Features:
    own = job.features
    if 1 <= measure <= 2:
        own = replace(own, recompute_norm=True, recompute_act=True)
        own = replace(own, swap_attention=own.swap_attention or measure == 2)
    elif measure == FULL:
        own = replace(own, recompute_norm=False, recompute_act=False, swap_attention=False, swap_auto=False)
    if host:
        own = replace(own, swap_optimizer=True, reuse=False, virtual=())
    return own


def _training(job: Job, measure: int) -> Training:
    return replace(job.training, full=-1, full_group=1, modules=()) if measure == FULL else job.training


def text(found: list[Found], given: Sequence[str]) -> str:
    """For a terminal.

    Args:
        found: result of :func:`search`.
        given: command line of the job that was searched for, script first if there is one.
    """
    rows = [("layout", "micro", "step [s]", "tokens/s", "MFU", "GiB", "host GiB", "limited by")]
    for each in found:
        own = each.plan
        layout = own.job.layout
        ends = "".join(
            f" {name} {count}" for name, count in (("first", layout.first), ("last", layout.last)) if count
        )
        if layout.stages:
            ends = f" layers {'+'.join(str(stage.count('t')) for stage in layout.stages)}"
        rows.append(
            (
                f"{layout}{ends}",
                str(own.job.training.micro),
                f"{own.time.total:.2f}",
                f"{own.tokens_per_second:,.0f}",
                f"{own.utilisation():.1%}",
                f"{own.worst.total / GIB:.1f}",
                f"{max(each.host for each in own.ranks) / GIB:.1f}",
                own.time.limit,
            )
        )
    head, *lines = aligned(rows)
    device = found[0].plan.device
    all_ranks = found[0].plan.job.layout.devices
    ranks = min(device.host_devices, all_ranks)
    shown = [
        f"{all_ranks} x {device.name}, {found[0].plan.verdict}",
        f"{device.memory:g} GiB of a rank, {device.reserve:g} in reserve",
        f"{device.host_memory:g} GiB of the host of {ranks} rank{'s' * (ranks > 1)}, assumed",
    ]
    shown = ["; ".join(shown), head]
    for line, each in zip(lines, found, strict=True):
        shown += [line, *command_lines.shown(command_lines.words_for(given, each.plan.job))]
    said = dict.fromkeys([*found[0].plan.job.notes, *(limits(each.plan.job) for each in found)])
    return "\n".join([*shown, *report.notes(filter(None, said))])
