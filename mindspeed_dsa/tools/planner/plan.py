"""A plan: memory, communication, work and time of one job on one kind of device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mindspeed_dsa.tools.planner import communication, layouts, memory, sizes, work
from mindspeed_dsa.tools.planner.communication import Transfer
from mindspeed_dsa.tools.planner.job import Job
from mindspeed_dsa.tools.planner.memory import GIB, RankMemory
from mindspeed_dsa.tools.planner.timing import Device, Estimate, StepTime, hidden_swaps

ALLOCATOR = 0.05
"""Share that the allocator is assumed to add: blocks that nothing fits into."""
FITS, TIGHT, TOO_LARGE = "fits", "tight", "does NOT fit"
"""Verdicts: with the allocator's share and the reserve; as tensors need it alone; not even that."""


@dataclass(frozen=True)
class Plan:
    """Everything that is printed.

    Attributes:
        ranks: memory of each pipeline rank.
        transfers: of each pipeline rank.
        flops: of the model, by part, forward and backward of one sequence.
        least: devices that one replica needs.
        fitting: of the same layout with more replicas, the fewest devices whose memory suffices; None: no
            number does.
    """

    job: Job
    device: Device
    ranks: list[RankMemory]
    transfers: list[list[Transfer]]
    flops: dict[str, float]
    time: StepTime
    least: int
    fitting: int | None

    @property
    def worst(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.ranks, key=lambda each: each.total)

    @property
    def verdict(self) -> str:
        """Return :data:`FITS`, :data:`TIGHT` or :data:`TOO_LARGE`."""
        if self.node_host > self.device.host_memory * GIB:
            return TOO_LARGE
        return verdict(self.worst, self.device)

    @property
    def fits(self) -> bool:
        """Return whether every rank fits, and something is left."""
        return self.verdict == FITS

    @property
    def node_host(self) -> float:
        """Return the bytes that features move to the host of a node whose ranks move most."""
        return on_node(self.ranks, self.job, self.device)

    @property
    def tokens_per_second(self) -> float:
        """Return the rate of the whole job."""
        return self.job.training.batch * self.job.training.sequence / self.time.total

    def utilisation(self, tokens_per_second: float | None = None) -> float:
        """Model FLOPs over the devices', at a rate of tokens, or at the estimated one."""
        rate = self.tokens_per_second if tokens_per_second is None else tokens_per_second
        return work.utilisation(self.job, rate, self.device.tflops)

    def record(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "layout": {**asdict(self.job.layout), "devices": self.job.layout.devices},
            "model": {
                "parameters": sum(w.numbers for w in sizes.model_weights(self.job.model)),
                "by_part": sizes.by_part(sizes.model_weights(self.job.model)),
                "selecting_layers": list(self.job.model.selecting),
            },
            "device": asdict(self.device),
            "verdict": self.verdict,
            "fits": self.fits,
            "host_of_a_node": self.node_host,
            "least_devices": self.least,
            "fitting_devices": self.fitting,
            "memory": [
                {
                    **asdict(each),
                    "state": each.state,
                    "kept": each.kept,
                    "allocated": each.allocated,
                    "total": each.total,
                }
                for each in self.ranks
            ],
            "transfers": [[asdict(each) for each in own] for own in self.transfers],
            "model_flops": self.flops,
            "step": {
                "seconds": self.time.total,
                "parts": self.time.parts,
                "hidden": self.time.hidden,
                "limit": self.time.limit,
                "tokens_per_second": self.tokens_per_second,
                "utilisation": self.utilisation(),
            },
            "notes": list(self.job.notes),
        }


def budget(device: Device) -> float:
    """Return the bytes that a plan may fill: without the reserve."""
    return (device.memory - device.reserve) * GIB


def verdict(worst: RankMemory, device: Device) -> str:
    """Return the verdict on a device's memory.

    Args:
        worst: rank that needs most.
        device: device that it runs on.
    """
    if worst.total <= budget(device):
        return FITS
    return TIGHT if worst.allocated <= device.memory * GIB else TOO_LARGE


def on_node(ranks: Sequence[RankMemory], job: Job, device: Device) -> float:
    """Return the bytes on one host, whose devices have the same pipeline rank."""
    return max(each.host for each in ranks) * min(device.host_devices, job.layout.devices)


def make(job: Job, device: Device, allocator: float = ALLOCATOR, quick: bool = False) -> Plan:
    """Plan one job.

    Args:
        job: checked.
        device: device that it runs on.
        allocator: share that the allocator is assumed to add.
        quick: for searches: the schedule from its slowest stage instead of event by event, and no count of
            fitting devices.
    """
    ranks = memory.of_job(job, allocator)
    if job.features.swap_auto:
        job = with_shares(job, hidden_swaps(job, device, ranks))
        ranks = memory.of_job(job, allocator)
        if too_large := {each.rank for each in ranks if each.total > budget(device)}:
            # What stays has no room there, so the job goes on swapping everything.
            shares = job.features.swap_shares
            job = with_shares(job, [1.0 if rank in too_large else each for rank, each in enumerate(shares)])
            ranks = memory.of_job(job, allocator)
    transfers = communication.of_job(job)
    return Plan(
        job=job,
        device=device,
        ranks=ranks,
        transfers=transfers,
        flops=work.model_flops(job),
        time=Estimate(job, device, ranks, transfers).step(simulated=not quick),
        least=layouts.least_devices(job.layout),
        fitting=None if quick else _fitting(job, device, allocator),
    )


def with_shares(job: Job, shares: Sequence[float]) -> Job:
    """Return a job of whose attention each pipeline rank swaps such a share."""
    return replace(job, features=replace(job.features, swap_shares=tuple(shares)))


def _fitting(job: Job, device: Device, allocator: float) -> int | None:
    """Only the optimizer's shards shrink with more replicas, so the answer is found by doubling."""
    least = layouts.least_devices(job.layout)
    replicas = least // (job.layout.tp * job.layout.pp * job.layout.cp)
    for power in range(11):
        layout = replace(job.layout, dp=replicas * 2**power)
        step = job.training.micro * layout.dp
        batch = math.ceil(job.training.batch / step) * step
        other = replace(job, layout=layout, training=replace(job.training, batch=batch))
        if max(each.total for each in memory.of_job(other, allocator)) <= budget(device):
            return layout.devices
        if not job.training.distributed:
            return None
    return None
