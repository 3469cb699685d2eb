"""Plan of a job: estimated memory, communication, FLOPs and step time on one kind of device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mindspeed_dsa.tools.planner import communication, layouts, memory, sizes, work
from mindspeed_dsa.tools.planner.communication import Transfer
from mindspeed_dsa.tools.planner.devices import CONSTANTS, Device
from mindspeed_dsa.tools.planner.job import Job
from mindspeed_dsa.tools.planner.memory import GIB, RankMemory
from mindspeed_dsa.tools.planner.timing import Estimate, StepTime, hidden_swaps

ALLOCATOR = 0.05
"""Assumed share of memory that the allocator loses to fragmentation."""
SPREAD = 1.25
"""Factor between the planned step time and either end of its range: most tuned jobs are inside."""
ONE_MICROBATCH = 2.0
"""The same for the upper end with one microbatch per step, where fixed times decide."""
FITS, TIGHT, TOO_LARGE = "fits", "tight", "does NOT fit"
"""Verdicts: memory suffices with the allocator's share and the reserve; for tensors only; not at all."""


@dataclass(frozen=True)
class Plan:
    """A finished plan.

    Attributes:
        ranks: memory of each pipeline rank.
        transfers: transfers of each pipeline rank.
        flops: dict from part to the model's FLOPs for forward and backward of one sequence.
        least: number of devices that one replica needs.
        fitting: smallest number of devices on which the layout fits, with more replicas; None if it never
            fits.
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
        """Memory of the pipeline rank that needs most."""
        return max(self.ranks, key=lambda each: each.total)

    @property
    def verdict(self) -> str:
        """One of :data:`FITS`, :data:`TIGHT` and :data:`TOO_LARGE`, for device memory and host memory."""
        if self.node_host > self.device.host_memory * GIB:
            return TOO_LARGE
        return verdict(self.worst, self.device)

    @property
    def fits(self) -> bool:
        """Whether the verdict is :data:`FITS`."""
        return self.verdict == FITS

    @property
    def node_host(self) -> float:
        """Bytes that features keep in host memory, on the node that needs most."""
        return on_node(self.ranks, self.job, self.device)

    @property
    def seconds_range(self) -> tuple[float, float]:
        """Range of the step time in seconds that a tuned job is expected to have."""
        above = ONE_MICROBATCH if self.job.microbatches == 1 else SPREAD
        return self.time.total / SPREAD, self.time.total * above

    @property
    def tokens_per_second(self) -> float:
        """Estimated tokens per second of the whole job."""
        return self.job.training.batch * self.job.training.sequence / self.time.total

    def utilisation(self, tokens_per_second: float | None = None) -> float:
        """Return the model FLOPs utilisation at a given or at the estimated rate of tokens."""
        rate = self.tokens_per_second if tokens_per_second is None else tokens_per_second
        return work.utilisation(self.job, rate, self.device.tflops)

    @property
    def _imbalance_source(self) -> str:
        if self.job.imbalances:
            return "recorded loads"
        return f"usual with {self.job.balancing}" if self.job.balancing else "given"

    def record(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON."""
        return {
            "layout": {**asdict(self.job.layout), "devices": self.job.layout.devices},
            "model": {
                "parameters": sum(w.numbers for w in sizes.model_weights(self.job.model)),
                "by_part": sizes.by_part(sizes.model_weights(self.job.model)),
                "selecting_layers": list(self.job.model.selecting),
            },
            "device": asdict(self.device),
            "constants": {
                **{
                    name: {"value": getattr(self.device, name), **asdict(constant)}
                    for name, constant in CONSTANTS.items()
                },
                "imbalance": {
                    "value": self.job.skew,
                    "meaning": "expert tokens of the fullest rank over the mean of all, in the worst layer",
                    "by_layer": [kind.skew for kind in (*self.job.kinds, *self.job.mtp_kinds)],
                    "source": self._imbalance_source,
                },
            },
            "verdict": self.verdict,
            "fits": self.fits,
            "host_of_a_node": self.node_host,
            "least_devices": self.least,
            "fitting_devices": self.fitting,
            "memory": [
                {
                    **asdict(item),
                    "state": item.state,
                    "kept": item.kept,
                    "allocated": item.allocated,
                    "total": item.total,
                }
                for item in self.ranks
            ],
            "transfers": [[asdict(item) for item in rank_transfers] for rank_transfers in self.transfers],
            "model_flops": self.flops,
            "step": {
                "seconds": self.time.total,
                "seconds_range": list(self.seconds_range),
                "parts": self.time.parts,
                "hidden": self.time.hidden,
                "limit": self.time.limit,
                "tokens_per_second": self.tokens_per_second,
                "utilisation": self.utilisation(),
            },
            "notes": list(self.job.notes),
        }


def budget(device: Device) -> float:
    """Return the bytes of a device that tensors may use: its memory without the reserve."""
    return (device.memory - device.reserve) * GIB


def verdict(worst: RankMemory, device: Device) -> str:
    """Return :data:`FITS`, :data:`TIGHT` or :data:`TOO_LARGE`: whether a rank's memory fits the device.

    Args:
        worst: memory of the rank that needs most.
        device: device that it runs on.
    """
    if worst.total <= budget(device):
        return FITS
    return TIGHT if worst.allocated <= device.memory * GIB else TOO_LARGE


def on_node(ranks: Sequence[RankMemory], job: Job, device: Device) -> float:
    """Return an upper bound of a node's host bytes, with the largest pipeline rank on all of its devices."""
    return max(each.host for each in ranks) * min(device.host_devices, job.layout.devices)


def make(job: Job, device: Device, allocator: float = ALLOCATOR, quick: bool = False) -> Plan:
    """Return the plan of a job: estimated memory, communication, FLOPs and step time.

    Args:
        job: checked job.
        device: device that it runs on.
        allocator: assumed overhead of the allocator, as a share of the tensors' bytes.
        quick: whether to estimate the step time from the slowest stage instead of a simulated schedule, and
            to leave out :attr:`Plan.fitting`; used by searches.
    """
    ranks = memory.of_job(job, allocator)
    if job.features.swap_auto:
        job = with_shares(job, hidden_swaps(job, device, ranks))
        ranks = memory.of_job(job, allocator)
        if too_large := {
            memory_of_rank.rank for memory_of_rank in ranks if memory_of_rank.total > budget(device)
        }:
            # Swapping only the hidden share leaves too much on these ranks: like the job, swap everything
            # there.
            shares = job.features.swap_shares
            job = with_shares(job, [1.0 if rank in too_large else old for rank, old in enumerate(shares)])
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
    """Return a copy of the job with :attr:`Features.swap_shares` set for ``--swap-attention auto``."""
    return replace(job, features=replace(job.features, swap_shares=tuple(shares)))


def _fitting(job: Job, device: Device, allocator: float) -> int | None:
    """Return the smallest fitting number of devices for the layout, found by doubling the replicas."""
    least = layouts.least_devices(job.layout)
    replicas = least // (job.layout.tp * job.layout.pp * job.layout.cp)
    for power in range(11):
        layout = replace(job.layout, dp=replicas * 2**power)
        # The global batch must be a multiple of micro-batch size x replicas.
        step = job.training.micro * layout.dp
        batch = math.ceil(job.training.batch / step) * step
        other = replace(job, layout=layout, training=replace(job.training, batch=batch))
        # DualPipeV needs more microbatches than many replicas leave of a batch.
        if not layouts.works(other):
            return None
        ranks = memory.of_job(other, allocator)
        has_room = on_node(ranks, other, device) <= device.host_memory * GIB
        if has_room and max(each.total for each in ranks) <= budget(device):
            return layout.devices
        # Without a distributed optimizer, more replicas do not save memory.
        if not job.training.distributed:
            return None
    return None
