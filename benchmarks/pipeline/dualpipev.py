"""Steps under DualPipeV beside interleaved 1F1B and 1F1B, in turns over a slow link, and their bubbles.

One process of each rank holds the model once for every way to run it, dealt out as that way has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.moe.problem import deviation, minima
from benchmarks.pipeline import dense_steps
from benchmarks.pipeline.dense_steps import pipeline_step
from benchmarks.pipeline.pairs import copies
from benchmarks.registry import Metrics
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.schedule import beside, recorded
from mindspeed_dsa.schedule.events import Costs
from mindspeed_dsa.schedule.simulate import simulate

V = {"schedules_method": "dualpipev"}
PAIRS = {"moe_fb_overlap": True}
BOUND = 0.1
"""By which share a recorded step's bubbles may differ from those of its simulation."""


@dataclass(frozen=True)
class Way:
    """A way to run a step.

    Attributes:
        chunks: of a rank.
        switches: for ``mindspeed_dsa.enable``.
        transfers: whether all-to-alls are what they are, or copies.
    """

    chunks: int
    switches: Mapping[str, Any] = field(default_factory=dict)
    transfers: bool = True

    def layout(self, ranks: int, microbatches: int) -> recorded.Layout:
        """Return what the simulator needs to know of it."""
        v_shaped, paired = "schedules_method" in self.switches, "moe_fb_overlap" in self.switches
        return recorded.Layout(
            ranks,
            self.chunks,
            microbatches,
            group=ranks,
            paired=paired,
            extra_warmup=paired and not v_shaped,
            split=bool({"split_backward", "dualpipev_dw_detach"} & self.switches.keys()),
            v_shaped=v_shaped,
        )


FIRST, STOCK = "1F1B", "interleaved"
DENSE = {
    FIRST: Way(1),
    STOCK: Way(2),
    "interleaved, split": Way(2, {"split_backward": True}),
    "DualPipeV": Way(2, V),
    "DualPipeV, detached": Way(2, {**V, "dualpipev_dw_detach": True}),
}
WITH_EXPERTS = {
    FIRST: Way(1),
    STOCK: Way(2),
    "interleaved, pairs": Way(2, PAIRS),
    "DualPipeV, pairs": Way(2, {**V, **PAIRS}),
    "no transfers": Way(2, transfers=False),
}
EXPERTS = {
    "num_moe_experts": 8,
    "moe_router_topk": 4,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


@dataclass(frozen=True)
class Place:
    """Ranks of a measurement, and what runs on them.

    Attributes:
        ranks: of the pipeline.
        expert_ranks: in each stage.
        ways: by name.
        rivals: whose times ``dualpipe_over_interleaved`` compares.
        config: more of Megatron's configuration.
    """

    ranks: int
    expert_ranks: int
    ways: Mapping[str, Way]
    rivals: tuple[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)


def places(hidden: int) -> dict[str, Place]:
    """Return what is measured, by name, of a model of that width."""
    widths = {"moe_ffn_hidden_size": hidden // 2, "moe_shared_expert_intermediate_size": hidden}
    dense = ("DualPipeV", STOCK)
    return {
        "PP2": Place(2, 1, DENSE, dense),
        "PP4": Place(4, 1, DENSE, dense),
        "PP2 x EP2": Place(
            2, 2, WITH_EXPERTS, ("DualPipeV, pairs", "interleaved, pairs"), {**EXPERTS, **widths}
        ),
    }


@dataclass(frozen=True)
class Sizes(dense_steps.Sizes):
    """Sizes of the measurement.

    Attributes:
        traces: steps of each way that are recorded after those that are timed.
    """

    traces: int = 9


def _sizes(place: Place, quick: bool) -> Sizes:
    layers = 2 * place.ranks
    if quick:
        return Sizes(layers, microbatches=layers, tokens=16, hidden=64, rounds=1, traces=1)
    return Sizes(layers, microbatches=2 * layers, tokens=256, hidden=512, rounds=5)


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries, with a caution where ranks share cores."""
    found = {}
    for name, place in places(64 if quick else 512).items():
        found[name] = _measured(place, _sizes(place, quick), link)
        print(f"dualpipev, {name}: {found[name]}", file=sys.stderr, flush=True)
    headline = {name: each["dualpipe_over_interleaved"] for name, each in found.items()}
    return {"dualpipe_over_interleaved": headline, "dualpipev": found}


def _measured(place: Place, sizes: Sizes, link: str) -> Metrics:
    cores, ranks = sorted(os.sched_getaffinity(0)), place.ranks * place.expert_ranks
    shared = len(cores) < ranks
    with (
        tempfile.TemporaryDirectory(prefix="dualpipev-") as folder,
        LinkBed(ranks, link, [cores[rank % len(cores)] for rank in range(ranks)]) as bed,
    ):
        found = bed.run(
            "benchmarks.pipeline.dualpipev:measure",
            place=place,
            sizes=dataclasses.replace(sizes, traces=0) if shared else sizes,
            folder=folder,
        )
        bubbles = {way.name: _bubbles(way) for way in sorted(Path(folder).iterdir())}
    caution = f"{ranks} ranks share {len(cores)} cores, which are hardly idle" if shared else None
    return metrics(place, sizes.microbatches, found[0], bubbles, caution)


def metrics(
    place: Place,
    microbatches: int,
    found: Mapping[str, Any],
    bubbles: Mapping[str, Sequence[tuple[float, float]]],
    caution: str | None = None,
) -> Metrics:
    """Convert times of steps to ratios, of medians.

    Args:
        place: what was measured.
        microbatches: of a step.
        found: of :func:`measure`.
        bubbles: by way, of each recorded step its bubbles and those of its simulation.
        caution: what is to be known of these figures.
    """
    median = {name: 1e3 * timing.median for name, timing in found["times"].items()}
    costs = _costs(1 - median["no transfers"] / median[STOCK] if "no transfers" in median else 0.0)
    lists = {
        name: _simulated(way.layout(place.ranks, microbatches), costs)
        for name, way in place.ways.items()
        if way.transfers
    }
    ours, rival = place.rivals
    return {
        "dualpipe_over_interleaved": median[ours] / median[rival],
        "dualpipe_over_interleaved_simulated": lists[ours] / lists[rival],
        "step_over_stock": {name: each / median[STOCK] for name, each in median.items()},
        "step_over_stock_simulated": {name: each / lists[STOCK] for name, each in lists.items()},
        "milliseconds_median": median,
        "milliseconds": {name: 1e3 * timing.wall for name, timing in found["times"].items()},
        "processor_milliseconds": {name: 1e3 * timing.processor for name, timing in found["times"].items()},
        "bubbles": {name: _compared(each) for name, each in bubbles.items()},
        "deviation": found["deviation"],
        **({"caution": caution} if caution else {}),
    }


def _costs(exposed: float) -> Costs:
    """Return costs of a chunk: forward and both gradients of 1 each, and all-to-alls.

    Args:
        exposed: share of a stock step that is lost to all-to-alls; as many bytes travel in either direction.
    """
    transfers = 3 * exposed / (1 - exposed)
    return Costs(all_to_all_forward=transfers / 2, all_to_all_backward=transfers / 2)


def _simulated(layout: recorded.Layout, costs: Costs) -> float:
    """Return a step's length, where a rank with one chunk has as many layers as one with two."""
    own = costs.scaled(2 / layout.chunks)
    return simulate(beside.schedule_of(layout, Megatron()), own).step_time


def _compared(steps: Sequence[tuple[float, float]]) -> Metrics:
    """Return bubbles, as shares of a step, of the median recorded step and of the median simulation."""
    over = sorted(real / own for real, own in steps)
    return {
        "recorded": statistics.median(real for real, _ in steps),
        "simulated": statistics.median(own for _, own in steps),
        "recorded_over_simulated": statistics.median(over),
        "recorded_over_simulated_by_step": over,
        "bound": BOUND,
        "is_within_bound": abs(statistics.median(over) - 1) <= BOUND,
    }


def _bubbles(folder: Path) -> list[tuple[float, float]]:
    found = [beside.compare(each, Megatron()) for each in sorted(folder.iterdir())]
    if any(step.other_order for step in found):
        raise RuntimeError(f"dualpipev: {folder.name} ran another order than its list; it is not reported")
    return [(real.bubble_fraction, own.bubble_fraction) for real, own in (step.figures() for step in found)]


def measure(place: Place, sizes: Sizes, folder: str) -> dict[str, Any]:
    """Times of all ways, the same on all ranks; recorded steps are written to the folder.

    Args:
        place: ranks, and the ways to run a step.
        sizes: of the model and the batch.
        folder: gets one folder for each way and recorded step.
    """
    _arm(place.ways[FIRST])
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=place.ranks,
        expert_model_parallel_size=place.expert_ranks,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    steps: dict[str, Callable[[], dict[str, Tensor]]] = {}
    for name, way in place.ways.items():
        _arm(way)
        step = pipeline_step(
            way.chunks, sizes, {"expert_model_parallel_size": place.expert_ranks, **place.config}
        )
        steps[name] = partial(_step, step, way)

    def arm(name: str, **more: Any) -> None:
        _arm(place.ways[name], **more)

    real = [name for name, way in place.ways.items() if way.transfers]
    whole = {}
    for name in real:
        arm(name)
        whole[name] = _of_all_ranks(steps[name]())
    deviates = max(deviation(whole[name], whole[FIRST]) for name in real)
    whole.clear()
    times = minima(steps, sizes.rounds, arm)
    for number in range(sizes.traces):
        for name in real:
            arm(name, trace_schedule=f"{folder}/{name}/{number}", trace_schedule_step=1)
            steps[name]()
    return {"deviation": deviates, "times": times}


def _arm(way: Way, **more: Any) -> None:
    """Switch on a way's features, and say how many chunks a rank has."""
    import mindspeed_dsa

    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**way.switches, **more)
    from megatron.core import parallel_state

    parallel_state.set_virtual_pipeline_model_parallel_world_size(way.chunks if way.chunks > 1 else None)


def _step(step: dense_steps.Step, way: Way) -> dict[str, Tensor]:
    return step(contextlib.nullcontext() if way.transfers else copies())


def _of_all_ranks(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what all ranks have found; each data parallel rank has its own batch and experts."""
    from megatron.core import parallel_state

    replica = parallel_state.get_data_parallel_rank()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {f"{replica} {name}": value for name, value in found.items()})
    return {name: value for each in gathered for name, value in each.items()}
