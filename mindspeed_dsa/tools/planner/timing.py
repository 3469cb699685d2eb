"""Estimate of the step time from FLOPs, bytes and a device's rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_dsa.features.memory.swap_attention.feature import MARGIN
from mindspeed_dsa.schedule.events import Costs, Kind
from mindspeed_dsa.schedule.simulate import simulate
from mindspeed_dsa.tools.planner import layouts, schedules, work
from mindspeed_dsa.tools.planner.communication import Transfer
from mindspeed_dsa.tools.planner.devices import Device
from mindspeed_dsa.tools.planner.job import Job
from mindspeed_dsa.tools.planner.links import seconds
from mindspeed_dsa.tools.planner.memory import RankMemory

CHUNKED = 0.75
"""Share of a linear layer's transfer hidden by ``--use-ascend-coc``: at most three of its four chunks."""
HALVES = 0.5
"""Share of dispatch and combine hidden by ``--moe-batch-overlap``: one half of the batch's."""
PASSES = 3
"""Passes of memory-bound operations over the kept activations: one write and two reads."""
FORWARD_LAUNCHES = 0.4
"""Share of a layer's launches in its forward: 5.4 to 7.1 of 14 to 18 ms of one layer in Megatron's CI."""
STEP_PASSES = {True: 32, False: 28}
"""Bytes per parameter that Adam reads and writes, with bf16 weights and fp32 masters, and with fp32 only."""
FP32_STATE = 12
"""Bytes per parameter of master weight and moments in fp32."""
SIMULATED = 3000
"""Largest number of simulated events. Further microbatches are added at the steady rate."""


@dataclass(frozen=True)
class Stage:
    """Seconds of one microbatch in one chunk of a pipeline rank.

    Attributes:
        forward: seconds of computation and exposed communication.
        backward: seconds of computation, recomputation and exposed communication.
        weights: seconds of the backward's weight gradients that may be deferred.
    """

    forward: float
    backward: float
    weights: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        total: seconds of the slowest rank.
        parts: dict from part to seconds on the slowest rank: computation, exposed communication by group,
            waiting. The sum is ``total``.
        hidden: dict from group to seconds of communication hidden by computation.
        limit: part that takes longest.
    """

    total: float
    parts: dict[str, float]
    hidden: dict[str, float]

    @property
    def limit(self) -> str:
        """Name of the part of the step that takes longest."""
        return max(self.parts, key=lambda part: self.parts[part])


def compute(job: Job, device: Device, rank: int, chunk: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return dicts from part to seconds of a microbatch's forward and backward, without recomputation."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for item in work.chunk(job, rank, chunk):
        forward[item.part] = forward.get(item.part, 0.0) + spent(device, item, item.forward, item.moved)
        behind = spent(device, item, item.backward, item.moved_back)
        backward[item.part] = backward.get(item.part, 0.0) + behind
    return forward, backward


def spent(device: Device, item: work.Work, flops: float, moved: float) -> float:
    """Return the seconds of FLOPs and moved bytes: their sum, or the larger for sparse attention."""
    share: float = getattr(device, item.kind)
    computing = flops / (device.tflops * 1e12 * share)
    moving = moved / (device.hbm * 1e9 * device.moving)
    return max(computing, moving) if item.kind == "sparse" else computing + moving


def recomputation(job: Job, device: Device, rank: int, chunk: int) -> float:
    """Return the seconds of a microbatch's recomputed work in a chunk's backward."""
    items = work.repeated(job, rank, chunk)
    return sum(spent(device, item, item.forward, item.moved) for item in items)


def launched(job: Job, device: Device, rank: int, chunk: int) -> tuple[float, float]:
    """Return the seconds in which the host launches a chunk's passes of a microbatch, and the device's gaps.

    The host launches forward and backward, with full recomputation (of a layer, or of its experts) a forward
    more. Gaps are waits of the device between kernels of a layer with experts.
    """
    training, model = job.training, job.model
    held = layouts.chunks(job.layout, model)[rank][chunk]
    layers = [
        (model.kinds[number].experts, training.full < 0 or place < training.full)
        for place, number in enumerate(held)
    ]
    if job.layout.ends(rank, chunk):
        layers += [(kind.experts, training.full < 0) for kind in model.mtp_kinds]
    host = gaps = 0.0
    for experts, whole in layers:
        again = FORWARD_LAUNCHES * (whole or (experts and "moe" in training.modules))
        host += (1 + again) * (device.host_experts if experts else device.host_dense) / 1e3
        gaps += experts * device.gap / 1e3
    return host * (device.host_graphs if training.graphs else 1.0), gaps


def weight_gradients(job: Job, device: Device, rank: int, chunk: int) -> float:
    """Return the seconds of a microbatch's weight gradients that a split backward defers."""
    items = work.chunk(job, rank, chunk) if job.features.split else []
    return sum(spent(device, item, item.weights, item.moved_weights) for item in items if item.weights)


def hidden_swaps(job: Job, device: Device, memory: Sequence[RankMemory]) -> tuple[float, ...]:
    """Return the share of attention activations that ``--swap-attention auto`` swaps, per pipeline rank.

    The copies must be hidden by the rank's computation, and fit into ``--swap-attention-bytes`` for all
    microbatches in flight.

    Args:
        job: planned job.
        device: device with its rates.
        memory: memory of all pipeline ranks if everything is swapped.
    """
    shares = []
    for held in memory:
        chunks = [compute(job, device, held.rank, chunk) for chunk in range(job.layout.vpp)]
        # Copies to the host overlap with the forward, copies back with the backward: the shorter one decides.
        seconds = min(sum(sum(both[way].values()) for both in chunks) for way in (0, 1))
        moved, on_host = MARGIN * held.swapped / (device.host * 1e9), held.host - held.host_state
        within = job.features.swap_bytes / on_host if on_host else 1.0
        shares.append(min(1.0, seconds / moved if moved else 1.0, within))
    return tuple(shares)


class Estimate:
    """Time estimate for one job on one kind of device.

    Args:
        job: planned job.
        device: device with its rates.
        memory: memory of all pipeline ranks.
        transfers: transfers of all pipeline ranks.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        memory: Sequence[RankMemory],
        transfers: Sequence[Sequence[Transfer]],
    ) -> None:
        self.job, self.device, self.memory, self.transfers = job, device, memory, transfers
        self.hidden: dict[str, float] = {}

    def stages(self) -> list[list[Stage]]:
        """Return the stages of each pipeline rank, by chunk."""
        return [self._rank(rank)[0] for rank in range(self.job.layout.pp)]

    def step(self, simulated: bool = True) -> StepTime:
        """Estimate the time of one training step.

        Args:
            simulated: whether to simulate the pipeline schedule, instead of computing the time from the
                slowest stage.
        """
        layout = self.job.layout
        ranks = [self._rank(rank) for rank in range(layout.pp)]
        busiest = max(ranks, key=lambda each: sum(each[1].values()) + each[3])
        stages = [result[0] for result in ranks]
        ends = max(result[3] for result in ranks)
        running = self._pipeline(stages, simulated)
        parts = dict(busiest[1])
        waiting = running - sum(parts.values())
        if waiting > 1e-9 * running:
            parts["waiting in the pipeline"] = waiting
        for name, value in busiest[2].items():
            parts[name] = parts.get(name, 0.0) + value
        total = running + ends
        if self.job.training.fp8:
            total /= self.device.fp8
            parts = {name: value / self.device.fp8 for name, value in parts.items()}
        rest = total - sum(parts.values())
        if rest > 1e-9 * total:
            parts["end of the step, other ranks"] = rest
        return StepTime(total, {k: v for k, v in parts.items() if v > 0}, dict(self.hidden))

    def _rank(self, rank: int) -> tuple[list[Stage], dict[str, float], dict[str, float], float]:
        """Return a rank's stages, its seconds by part in the schedule and after it, and the latter's sum."""
        job, layout = self.job, self.job.layout
        count = job.microbatches
        transfers = self.transfers[rank]
        parts: dict[str, float] = {}
        stages: list[Stage] = []
        computed = [compute(job, self.device, rank, chunk) for chunk in range(layout.vpp)]
        repeated = [recomputation(job, self.device, rank, chunk) for chunk in range(layout.vpp)]
        sums = {"forward": 0.0, "backward": sum(repeated)}
        parts["recomputed"] = count * sum(repeated)
        for forward, backward in computed:
            for part, value in forward.items():
                parts[part] = parts.get(part, 0.0) + count * (value + backward[part])
            sums["forward"] += sum(forward.values())
            sums["backward"] += sum(backward.values())
        bound = self._memory_bound(rank)
        parts["memory-bound operations"] = count * bound
        swap = self._swap(rank, sum(sums.values()))
        parts["swapped attention"] = count * swap
        bound += swap
        open_comm = {when: self._open(transfers, when, sums[when], computed, parts) for when in sums}
        for chunk, (forward, backward) in enumerate(computed):
            host, gaps = launched(job, self.device, rank, chunk)
            ahead = sum(forward.values())
            share = ahead / sums["forward"] if sums["forward"] else 1 / layout.vpp
            # A rank's exposed transfers are spread over its chunks by their computation. A third of the
            # memory-bound time is in forward, two thirds in backward.
            before = ahead + share * (open_comm["forward"] / count + bound / 3) + gaps / 3
            after = sum(backward.values()) + repeated[chunk] + gaps * 2 / 3
            after += share * (open_comm["backward"] / count + bound * 2 / 3)
            # The host runs ahead of the device, so only the larger of their times counts.
            waits = max(0.0, host - before - after)
            longer = 1 + waits / (before + after) if waits else 1.0
            deferred = weight_gradients(job, self.device, rank, chunk)
            stages.append(Stage(before * longer, after * longer, deferred))
            parts["gaps between kernels"] = parts.get("gaps between kernels", 0.0) + count * gaps
            parts["launches by the host"] = parts.get("launches by the host", 0.0) + count * waits
        at_end = self._end(transfers, rank, sums)
        return stages, parts, at_end, sum(at_end.values())

    def _memory_bound(self, rank: int) -> float:
        """Return the seconds that a microbatch spends on norms, activation functions and copies."""
        memory = self.memory[rank]
        return (PASSES * memory.written + memory.repeated) / (self.device.hbm * 1e9 * self.device.moving)

    def _swap(self, rank: int, computed: float) -> float:
        """Return the seconds of a microbatch's swaps that computation does not hide."""
        # Once to the host and once back, both hidden by the microbatch's computation.
        return max(0.0, 2 * self.memory[rank].swapped / (self.device.host * 1e9) - computed)

    def _open(
        self,
        transfers: Sequence[Transfer],
        when: str,
        computed: float,
        parts_of: Sequence[tuple[dict[str, float], dict[str, float]]],
        parts: dict[str, float],
    ) -> float:
        """Return the seconds of communication that a rank does not hide, and add them to ``parts``."""
        features, count = self.job.features, self.job.microbatches
        exposed = 0.0
        index = 0 if when == "forward" else 1
        by_part: dict[str, float] = {}
        for chunk in parts_of:
            for part, value in chunk[index].items():
                by_part[part] = by_part.get(part, 0.0) + count * value
        groups: dict[str, float] = {}
        for each in transfers:
            if each.when == when and each.group != "PP":
                groups[each.group] = groups.get(each.group, 0.0) + seconds(self.job, self.device, each)
        ahead = count * computed if self.job.sharding and self.job.sharding.prefetch else 0.0
        for group, alone in groups.items():
            behind = 0.0
            if group == "EP" and features.pairs:
                behind = self.device.behind_pairs * min(alone, count * computed)
            elif group == "EP" and features.batch_overlap:
                behind = HALVES * min(alone, count * computed)
            elif group == "EP" and features.alltoall_overlap:
                weight = 0.5 * by_part.get("routed experts", 0.0) if when == "backward" else 0.0
                behind = by_part.get("shared experts", 0.0) + weight
            elif group == "TP" and features.coc:
                behind = CHUNKED * min(alone, count * computed)
            elif group in ("DP", "FSDP", "EDP", "EFSDP"):
                # Prefetched weights overlap with computation; the groups share the links, one after the
                # other.
                behind = ahead
                ahead = max(0.0, ahead - alone)
            elif group == "CP":
                behind = by_part.get("projections", 0.0) * (1.0 if self.job.model.sparse else 0.0)
                behind += 0.0 if self.job.model.sparse else by_part.get("attention", 0.0)
            hidden = min(alone, behind)
            self.hidden[group] = self.hidden.get(group, 0.0) + hidden
            parts[f"{group} transfers"] = parts.get(f"{group} transfers", 0.0) + alone - hidden
            exposed += alone - hidden
        return exposed

    def _end(self, transfers: Sequence[Transfer], rank: int, sums: dict[str, float]) -> dict[str, float]:
        job, training = self.job, self.job.training
        sums_at_end: dict[str, float] = {}
        for transfer in transfers:
            if transfer.when != "end":
                continue
            alone = seconds(job, self.device, transfer)
            behind = 0.0
            if transfer.collective in ("reduce-scatter", "all-reduce") and training.overlap_grad:
                behind = sums["backward"]
            if transfer.collective == "all-gather" and training.overlap_param:
                behind = sums["forward"]
            hidden = min(alone, behind) if transfer.group in ("DP", "EDP") else 0.0
            self.hidden[transfer.group] = self.hidden.get(transfer.group, 0.0) + hidden
            name = f"{transfer.group} transfers"
            sums_at_end[name] = sums_at_end.get(name, 0.0) + alone - hidden
        memory = self.memory[rank]
        # 1e9 parameters x 32 bytes at 65 % of 3350 GB/s take 14.7 ms; bf16 moments have 4 bytes less, twice.
        nbytes = STEP_PASSES[training.bf16] - 2 * (FP32_STATE - training.masters - training.moments)
        moved = memory.updated * nbytes / (self.device.hbm * 1e9 * self.device.moving)
        sums_at_end["optimizer"] = moved
        if job.features.swap_optimizer:
            # The state moves to the device and back while the optimizer computes.
            over_bus = 2 * memory.host_state / (self.device.host * 1e9) if training.bf16 else 0.0
            sums_at_end["optimizer"] = max(moved, over_bus)
        elif job.features.virtual:
            sums_at_end["optimizer"] = max(moved, 2 * memory.host_state / (self.device.host * 1e9))
        return sums_at_end

    def _pipeline(self, stages: Sequence[Sequence[Stage]], simulated: bool) -> float:
        """Return the seconds of the pipeline schedule with all microbatches."""
        job, layout = self.job, self.job.layout
        count = job.microbatches
        pace = max(sum(stage.forward + stage.backward for stage in rank_stages) for rank_stages in stages)
        fill = sum(stage.forward + stage.backward for rank_stages in stages for stage in rank_stages)
        p2p = self._p2p()
        if layout.pp == 1:
            return count * pace
        events = 2 * layout.pp * layout.vpp
        group = max(layout.group, layout.pp)
        # Whole groups of microbatches within the limit of events; PP 16 with 2 chunks: 3000 / 64 = 46 of
        # them.
        shown = min(count, max(2 * layout.pp, group, SIMULATED // events) // group * group or count)
        shown = count if count - shown < group else shown
        # At the slowest stage's rate, plus filling and draining the pipeline.
        if not simulated:
            return (count - 1) * pace + fill / layout.vpp + pace * (1 - 1 / layout.vpp) + 2 * layout.pp * p2p
        measured = {}
        for rank, rank_stages in enumerate(stages):
            for chunk, stage in enumerate(rank_stages):
                number = layout.stage(rank, chunk)
                measured[Kind.FORWARD, number] = stage.forward
                measured[Kind.BACKWARD, number] = stage.backward
                if job.features.split:
                    measured[Kind.BACKWARD, number] -= stage.weights
                    measured[Kind.WEIGHT, number] = stage.weights
        timeline = simulate(schedules.schedule(job, shown), Costs(measured=measured, p2p=p2p))
        return timeline.step_time + (count - shown) * pace

    def _p2p(self) -> float:
        """Return the seconds of one message between pipeline ranks."""
        job = self.job
        if job.layout.pp == 1:
            return 0.0
        rows = job.tokens / (job.layout.tp if job.layout.sequence else 1)
        message = Transfer("PP", "send", "", rows * job.model.hidden * job.training.number, "forward")
        return seconds(job, self.device, message)
