"""Other plans: layouts for a number of devices, the fastest that fit first, and one more flag."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.planner import communication, flags, layouts, memory, plan
from mindspeed_dsa.tools.planner.job import Features, Job, Layout, Training
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import ALLOCATOR, Plan
from mindspeed_dsa.tools.planner.report import memory_rows
from mindspeed_dsa.tools.planner.timing import Device

MEASURES = (
    "as given",
    "recompute norms and activation functions",
    "and swap attention",
    "full recompute",
)
"""What is tried, in this order, until a layout fits; and each of them with the optimizer on the host."""
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


def search(job: Job, device: Device, best: int = 5, allocator: float = ALLOCATOR) -> list[Found]:
    """The best layouts by estimated step time.

    Args:
        job: its layout's number of devices is kept; its batch, its model and its features too.
        device: the limit, and the rates.
        best: how many.
        allocator: share that it is assumed to add.

    Raises:
        SettingsError: nothing fits, with what comes closest.
    """
    fitting: list[Found] = []
    closest: tuple[float, Job] | None = None
    for candidate in candidates(job, device):
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
    fitting.sort(key=lambda each: each.plan.time.total)
    refined = [
        Found(plan.make(each.plan.job, device, allocator), each.measures) for each in fitting[:_REFINED]
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


def candidates(job: Job, device: Device) -> Iterator[Job]:
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
                        for micro in MICRO:
                            found = _candidate(job, (tp, pp, cp, ep, vpp), micro)
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
    training = replace(job.training, micro=micro)
    for split in (layout, *layouts.uneven(layout, job.model)):
        made = replace(job, layout=split, training=training)
        if made.microbatches and layouts.works(made):
            return made
    return None


def _fitted(job: Job, device: Device, allocator: float) -> Found | float:
    """With the cheapest measures that make it fit, or the bytes it needs with all of them."""
    tried = [(host, measure) for host in (False, True) for measure in range(len(MEASURES))]
    least = _needed(_with(job, *tried[-1]), allocator)
    if least > device.memory * GIB:
        return least
    for host, measure in tried:
        other = _with(job, host, measure)
        if _needed(other, allocator) <= device.memory * GIB:
            words = [MEASURES[measure]] if measure else []
            words += ["optimizer on the host"] if host and not job.features.swap_optimizer else []
            return Found(plan.make(other, device, allocator, quick=True), "; ".join(words))
    return least


def _needed(job: Job, allocator: float) -> float:
    return max(each.total for each in memory.of_job(job, allocator))


def _with(job: Job, host: bool, measure: int) -> Job:
    return replace(job, features=_features(job, measure, host), training=_training(job, measure))


def _features(job: Job, measure: int, host: bool) -> Features:
    own = job.features
    if 1 <= measure <= 2:
        own = replace(own, recompute_norm=True, recompute_act=True, swap_attention=measure == 2)
    if host:
        own = replace(own, swap_optimizer=True, reuse=False, virtual=())
    return own


def _training(job: Job, measure: int) -> Training:
    return replace(job.training, full=-1, full_group=1) if measure == 3 else job.training


def text(found: list[Found]) -> str:
    """For a terminal."""
    rows = [("layout", "micro", "step [s]", "tokens/s", "MFU", "GiB", "limited by", "with")]
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
                own.time.limit,
                each.measures,
            )
        )
    lines = aligned(rows)
    lines += [f"note: {said}" for said in dict.fromkeys(limits(each.plan.job) for each in found) if said]
    lines += [
        f"{each.plan.job.layout}: {layouts.split_of(each.plan.job.layout, each.plan.job.model).flags()}"
        for each in found
        if each.plan.job.layout.stages
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Difference:
    """Difference of two plans, with minus without.

    Attributes:
        flag: as given.
        memory: bytes on the rank that needs most, by row.
        host: bytes there on the host.
        received: bytes of the rank that receives most, by group.
        seconds: of a step, by part.
    """

    flag: str
    memory: Mapping[str, float]
    host: float
    received: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def memory_sum(self) -> float:
        """Bytes."""
        return sum(self.memory.values())

    @property
    def seconds_sum(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    def text(self) -> str:
        """For a terminal."""
        rows = [(f"with {self.flag}", "", "")]
        for name, value in (*self.memory.items(), ("memory", self.memory_sum), ("on the host", self.host)):
            if abs(value) > 5e-4 * GIB or name == "memory":
                rows.append((name, f"{value / GIB:+.2f}", "GiB"))
        for name, value in self.received.items():
            rows += [(f"{name} received", f"{value / 1e9:+.3f}", "GB")] if abs(value) > 1e5 else []
        for name, value in (*self.seconds.items(), ("step", self.seconds_sum)):
            if abs(value) > 5e-5 or name == "step":
                rows.append((name, f"{1e3 * value:+.1f}", "ms"))
        return "\n".join(aligned(rows))


def words_of(flag: str) -> list[str]:
    """``--flag``, ``--flag value`` or several, as one argument holds them.

    Raises:
        SettingsError: no plan depends on it.
    """
    words = shlex.split(flag)
    known = flags.parser()._option_string_actions
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    if unknown or not words or not words[0].startswith("--"):
        raise SettingsError(
            f"mindspeed_dsa plan: --what-if {flag!r} is no flag that a plan depends on; quote flag and value "
            "together, as in --what-if='--tensor-model-parallel-size 8'"
        )
    return words


def differences(chosen: list[str], before: Plan, planned: Callable[[list[str]], Plan]) -> list[Difference]:
    """One for each flag.

    Args:
        chosen: as given.
        before: without any of them.
        planned: makes a plan with more words on the job's command line.
    """
    return [difference(flag, before, planned(words_of(flag))) for flag in chosen]


def difference(flag: str, before: Plan, after: Plan) -> Difference:
    """With minus without."""

    def subtract(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {name: a.get(name, 0.0) - b.get(name, 0.0) for name in {**b, **a}}

    def memory(plan: Plan) -> dict[str, float]:
        return {name: values[plan.worst.rank] for name, values in memory_rows(plan).items()}

    def received(plan: Plan) -> dict[str, float]:
        busiest = max(plan.transfers, key=lambda own: sum(each.nbytes for each in own))
        return communication.by_group(busiest)

    return Difference(
        flag,
        subtract(memory(after), memory(before)),
        after.worst.host - before.worst.host,
        subtract(received(after), received(before)),
        subtract(after.time.parts, before.time.parts),
    )
