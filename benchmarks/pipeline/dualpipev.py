"""Steps under DualPipeV, interleaved 1F1B and 1F1B, in alternation over a slow link, and their bubbles.

Each rank's process holds the model once for every way to run it, with its layers placed as that way needs.
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
"""Largest relative difference of a recorded step's bubbles from its simulation's."""


@dataclass(frozen=True)
class Way:
    """A way to run a step.

    Attributes:
        chunks: chunks per rank.
        switches: arguments of ``mindspeed_dsa.enable``.
        transfers: whether all-to-alls transfer; otherwise they only copy.
    """

    chunks: int
    switches: Mapping[str, Any] = field(default_factory=dict)
    transfers: bool = True

    def layout(self, ranks: int, microbatches: int) -> recorded.Layout:
        """Return the simulator's description of this way."""
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
    """Ranks of a measurement, and the ways to run a step on them.

    Attributes:
        ranks: number of pipeline ranks.
        expert_ranks: expert parallel ranks in each stage.
        ways: ways by name.
        rivals: names of two ways; ``dualpipe_over_interleaved`` is the ratio of their times.
        config: additional arguments of Megatron's configuration.
    """

    ranks: int
    expert_ranks: int
    ways: Mapping[str, Way]
    rivals: tuple[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)


def places(hidden: int) -> dict[str, Place]:
    """Return the measurements by name, for a model of that width."""
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
        traces: steps of each way that are recorded after the timed ones.
    """

    traces: int = 9


def _sizes(place: Place, quick: bool) -> Sizes:
    layers = 2 * place.ranks
    if quick:
        return Sizes(layers, microbatches=layers, tokens=16, hidden=64, rounds=1, traces=1)
    return Sizes(layers, microbatches=2 * layers, tokens=256, hidden=512, rounds=5)


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries, with a caution where ranks share cores."""
    figures = {}
    for name, place in places(64 if quick else 512).items():
        figures[name] = _measured(place, _sizes(place, quick), link)
        print(f"dualpipev, {name}: {figures[name]}", file=sys.stderr, flush=True)
    headline = {name: each["dualpipe_over_interleaved"] for name, each in figures.items()}
    return {"dualpipe_over_interleaved": headline, "dualpipev": figures}


def _measured(place: Place, sizes: Sizes, link: str) -> Metrics:
    cores, ranks = sorted(os.sched_getaffinity(0)), place.ranks * place.expert_ranks
    shared = len(cores) < ranks
    with (
        tempfile.TemporaryDirectory(prefix="dualpipev-") as folder,
        LinkBed(ranks, link, [cores[rank % len(cores)] for rank in range(ranks)]) as bed,
    ):
        results = bed.run(
            "benchmarks.pipeline.dualpipev:measure",
            place=place,
            sizes=dataclasses.replace(sizes, traces=0) if shared else sizes,
            folder=folder,
        )
        bubbles = {way.name: _bubbles(way) for way in sorted(Path(folder).iterdir())}
    caution = f"{ranks} ranks share {len(cores)} cores, which are hardly idle" if shared else None
    return metrics(place, sizes.microbatches, results[0], bubbles, caution)


def metrics(
    place: Place,
    microbatches: int,
    found: Mapping[str, Any],
    bubbles: Mapping[str, Sequence[tuple[float, float]]],
    caution: str | None = None,
) -> Metrics:
    """Convert times of steps to ratios of medians.

    Args:
        place: measured place.
        microbatches: microbatches of a step.
        found: result of :func:`measure`.
        bubbles: bubbles of each recorded step and of its simulation, by way.
        caution: reservation about these figures.
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
        "step_over_stock": {name: value / median[STOCK] for name, value in median.items()},
        "step_over_stock_simulated": {name: value / lists[STOCK] for name, value in lists.items()},
        "milliseconds_median": median,
        "milliseconds": {name: 1e3 * timing.wall for name, timing in found["times"].items()},
        "processor_milliseconds": {name: 1e3 * timing.processor for name, timing in found["times"].items()},
        "bubbles": {name: _compared(value) for name, value in bubbles.items()},
        "deviation": found["deviation"],
        **({"caution": caution} if caution else {}),
    }


def _costs(exposed: float) -> Costs:
    """Return costs of a chunk: forward and both gradients of 1 each, and all-to-alls.

    Args:
        exposed: share of a stock step that is lost to all-to-alls; both directions transfer the same bytes.
    """
    # A chunk's own work is 3, so the share is transfers / (3 + transfers), solved for the transfers.
    transfers = 3 * exposed / (1 - exposed)
    return Costs(all_to_all_forward=transfers / 2, all_to_all_backward=transfers / 2)


def _simulated(layout: recorded.Layout, costs: Costs) -> float:
    """Return a step's simulated length; ranks with one chunk have as many layers as ranks with two."""
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
    comparisons = [beside.compare(each, Megatron()) for each in sorted(folder.iterdir())]
    if any(step.other_order for step in comparisons):
        raise RuntimeError(f"dualpipev: {folder.name} ran another order than its list; it is not reported")
    return [
        (real.bubble_fraction, own.bubble_fraction) for real, own in (step.figures() for step in comparisons)
    ]


def measure(place: Place, sizes: Sizes, folder: str) -> dict[str, Any]:
    """Return times of all ways, the same on all ranks; write recorded steps to the folder.

    Args:
        place: ranks, and the ways to run a step.
        sizes: sizes of the model and the batch.
        folder: folder that gets one folder for each way and recorded step.
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
        whole[name] = of_all_ranks(steps[name]())
    deviates = max(deviation(whole[name], whole[FIRST]) for name in real)
    whole.clear()
    times = minima(steps, sizes.rounds, arm)
    for number in range(sizes.traces):
        for name in real:
            arm(name, trace_schedule=f"{folder}/{name}/{number}", trace_schedule_step=1)
            steps[name]()
    return {"deviation": deviates, "times": times}


def _arm(way: Way, **more: Any) -> None:
    """Enable a way's features, and set the number of chunks per rank."""
    import mindspeed_dsa

    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**way.switches, **more)
    from megatron.core import parallel_state

    parallel_state.set_virtual_pipeline_model_parallel_world_size(way.chunks if way.chunks > 1 else None)


def _step(step: dense_steps.Step, way: Way) -> dict[str, Tensor]:
    return step(contextlib.nullcontext() if way.transfers else copies())


def of_all_ranks(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the results of all ranks; each data parallel rank has its own batch and experts."""
    from megatron.core import parallel_state

    replica = parallel_state.get_data_parallel_rank()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {f"{replica} {name}": value for name, value in found.items()})
    return {name: value for each in gathered for name, value in each.items()}
