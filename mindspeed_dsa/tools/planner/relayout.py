"""Layers of a job dealt to pipeline stages anew, so that the slowest stage is least: ``--expert-load``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import Version

from mindspeed_dsa.megatron.pipeline_chunks import FIRST, LAST, LAYOUT, stages_text
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.planner import command_lines, communication, layouts, memory, plan, report
from mindspeed_dsa.tools.planner.dealing import Dealing
from mindspeed_dsa.tools.planner.devices import Device
from mindspeed_dsa.tools.planner.job import Job, Layout
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import ALLOCATOR, Plan
from mindspeed_dsa.tools.planner.timing import Estimate

_LAYOUTS_SINCE = Version("0.14")
"""First Megatron-core release with ``--pipeline-model-parallel-layout``."""


@dataclass(frozen=True)
class Dealt:
    """Result of a search.

    Attributes:
        before: plan with the job's own split.
        after: plan with the new split, or ``before`` if no other split is faster.
        dealing: times of the layers, in seconds of a microbatch's forward and backward.
        wanted: number of layers of each stage in the best split if the release cannot express it, else empty.
        release: release of Megatron-core.
    """

    before: Plan
    after: Plan
    dealing: Dealing
    wanted: tuple[int, ...]
    release: str


def deal(job: Job, device: Device, release: str, allocator: float = ALLOCATOR) -> Dealt:
    """Deal the layers of a job to its pipeline stages, and keep all sizes of its layout.

    Args:
        job: checked job.
        device: device that it runs on.
        release: release of Megatron-core that will train it.
        allocator: assumed overhead of the allocator, as a share of the tensors' bytes.

    Raises:
        SettingsError: the job has no pipeline.
    """
    if job.layout.pp == 1:
        raise SettingsError(
            "mindspeed_dsa plan: --search with --expert-load deals layers to pipeline stages, and this job "
            "has one stage; set --pipeline-model-parallel-size, or omit --expert-load to search for layouts"
        )
    dealing = times(job, device, allocator)
    before = after = plan.make(job, device, allocator)

    def full(layout: Layout) -> list[int]:
        ranks = memory.of_job(replace(job, layout=layout), allocator)
        return [rank for rank, each in enumerate(ranks) if each.total > plan.budget(device)]

    today = sizes_of(job, job.layout)
    best, most = dealing.best() or today, [job.model.layers] * len(today)
    # Early stages keep activations of the most microbatches, and may not have room for more layers.
    while before.fits and best != today and (too_large := full(_with_stages(job, best))):
        for rank in too_large:
            stages = [stage for stage in range(len(best)) if dealing.rank_of(stage) == rank]
            largest = max(stages, key=lambda stage: best[stage])
            most[largest] = best[largest] - 1
        best = dealing.best(most) or today
    wanted: tuple[int, ...] = ()
    layout = _with_stages(job, best)
    if Version(release) < _LAYOUTS_SINCE:
        nearest = sorted(_expressible(job), key=lambda other: _distance(job, dealing, other, best))
        layout = next((other for other in nearest if not (before.fits and full(other))), job.layout)
        wanted = best if sizes_of(job, layout) != best else ()
    if sizes_of(job, layout) != sizes_of(job, job.layout):
        after = plan.make(replace(job, layout=layout), device, allocator)
    # Stages with equal times may be simulated to wait more.
    if after.time.total >= before.time.total:
        after = before
    return Dealt(before, after, dealing, wanted, release)


def times(job: Job, device: Device, allocator: float = ALLOCATOR) -> Dealing:
    """Return the planner's times of a job's layers, from a plan with one layer per stage.

    Settings that count layers of a rank, such as ``--recompute-norm-num-layers``, hold for every layer here.
    """
    model, layout = job.model, job.layout
    stages = ("E", *("t" * model.layers), "m" * model.mtp + "L")
    single = replace(layout, pp=len(stages), vpp=1, v_shaped=False, first=None, last=None, stages=stages)
    # These numbers are per rank, and belong to the end of a step.
    alone = replace(job, layout=single, features=replace(job.features, virtual=(), swap_shares=()))
    estimate = Estimate(alone, device, memory.of_job(alone, allocator), communication.of_job(alone))
    first, *layers, last = (stage.forward + stage.backward for (stage,) in estimate.stages())
    begins = [kind.selects for kind in model.kinds] if model.sparse and model.sharing.is_on else []
    # Prediction layers are built like a decoder layer of their stage, and need one.
    lone = not (model.mtp or layout.v_shaped or begins)
    return Dealing(layers, first, last, layout.pp, layout.vpp, layout.v_shaped, begins, lone)


def sizes_of(job: Job, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of each stage, in the model's order."""
    return tuple(map(len, layouts.split_of(layout, job.model).in_order))


def _plain(layout: Layout) -> Layout:
    return replace(layout, first=None, last=None, embedding_counts=False, loss_counts=False, stages=())


def _with_stages(job: Job, sizes: Sequence[int]) -> Layout:
    return replace(_plain(job.layout), stages=stages_text(sizes, job.model.mtp))


def _expressible(job: Job) -> Iterator[Layout]:
    """Yield the job's own split, and all that first and last stage's numbers can express."""
    yield job.layout
    if job.layout.v_shaped:
        return
    counts = (None, *range(1, job.model.layers))
    for first in counts:
        for last in counts:
            other = replace(_plain(job.layout), first=first, last=last)
            split = layouts.split_of(other, job.model)
            if not split.problem and not job.model.sharing.chunk_problem(split.in_order):
                yield other


def _distance(job: Job, dealing: Dealing, layout: Layout, best: Sequence[int]) -> tuple[float, int]:
    """Return the slowest stage's time, and how many layers are in other stages than in the best split."""
    sizes = sizes_of(job, layout)
    return max(dealing.stages(sizes)), sum(abs(a - b) for a, b in zip(sizes, best, strict=True))


def record(dealt: Dealt, words: Sequence[str]) -> dict[str, Any]:
    """Return both plans as plain data for JSON, with the new command line."""
    flags = shlex.join(command_lines.with_split(words, dealt.after.job))
    return {
        "before": dealt.before.record(),
        "after": {**dealt.after.record(), "flags": flags},
        "stages": {
            name: dealt.dealing.stages(sizes_of(made.job, made.job.layout))
            for name, made in (("before", dealt.before), ("after", dealt.after))
        },
        "wanted": list(dealt.wanted),
    }


def text(dealt: Dealt, words: Sequence[str]) -> str:
    """Return the table of both splits, and the command line of the new one.

    Args:
        dealt: result of :func:`deal`.
        words: command line of the job, script first if there is one.
    """
    rows: list[tuple[str, ...]] = [("split", "layers of the stages", "slowest stage [ms]", "step [s]", "GiB")]
    plans = {"today": dealt.before, "dealt": dealt.after}
    for name, made in plans.items():
        sizes = sizes_of(made.job, made.job.layout)
        rows.append(
            (
                name,
                "+".join(map(str, sizes)),
                f"{1e3 * max(dealt.dealing.stages(sizes)):.4g}",
                f"{made.time.total:.4g}",
                f"{made.worst.total / GIB:.1f}",
            )
        )
    job, device = dealt.before.job, dealt.before.device
    lines = [f"{job.layout} on {job.layout.devices} x {device.name}: {dealt.after.verdict}"]
    if dealt.after is dealt.before:
        lines += [
            *aligned(rows[:2]),
            "no dealt split fits and has a faster step: the job's flags stay as they are",
        ]
    else:
        gain = dealt.before.time.total / dealt.after.time.total
        split = command_lines.of_split(dealt.after.job.layout, job)
        lines += [*aligned(rows), f"{gain:.2f} times as fast with", *command_lines.shown(split)]
        lines += ["the whole job:", *command_lines.shown(command_lines.with_split(words, dealt.after.job))]
    return "\n".join([*lines, *report.notes([*_out_of_reach(dealt), *job.notes])])


def _out_of_reach(dealt: Dealt) -> list[str]:
    """Return a note on the best split if the release cannot express it."""
    if not dealt.wanted:
        return []
    best = "+".join(map(str, dealt.wanted))
    words = (
        f"Megatron-core {dealt.release} has no {LAYOUT}, which the best split needs: {best}, with a slowest "
        f"stage of {1e3 * max(dealt.dealing.stages(dealt.wanted)):.4g} ms. The split above is the nearest "
    )
    flags = "this release" if dealt.before.job.layout.v_shaped else f"{FIRST} and {LAST}"
    return [f"{words}that {flags} can express; releases from 0.14 on have the flag"]
