"""Steps with whole and with split backwards, on real pipeline ranks that talk over loopback.

In theory a step gets shorter by ``2 (PP - 1) W``, where ``W`` is the time of a chunk's weight gradients for
one microbatch. Only a rank with its own core is idle in a bubble: if ranks share cores, others work
meanwhile, and there is little to gain.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.moe.problem import deviation, minima
from benchmarks.pipeline.dense_steps import LAYOUTS, QUICK, Sizes, dense_step, on_ranks
from benchmarks.registry import Metrics
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.schedule import lists, megatron_order
from mindspeed_dsa.schedule.events import Costs
from mindspeed_dsa.schedule.simulate import simulate

SWITCH = {"split_backward": True}


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries, with a caution where ranks share cores."""
    found = {name: _layout(*layout, QUICK if quick else Sizes()) for name, layout in LAYOUTS.items()}
    print(f"split: {found}", file=sys.stderr, flush=True)
    return {"split": found}


def _layout(ranks: int, chunks: int, sizes: Sizes) -> Metrics:
    of_ranks, cores = on_ranks("benchmarks.pipeline.split:measure", ranks, chunks, sizes)
    caution = f"{ranks} ranks share {cores} cores, which are hardly idle" if cores < ranks else None
    return metrics(of_ranks, simulated_ratio(ranks, chunks, sizes.microbatches), caution)


def simulated_ratio(ranks: int, chunks: int, microbatches: int) -> float:
    """Return a step's simulated length over stock's, where F, dX and dW take the same time."""
    whole = megatron_order.schedule(Megatron(), ranks, chunks, microbatches)
    split, stock = (simulate(each, Costs()).step_time for each in (lists.weights_later(whole), whole))
    return split / stock


def metrics(of_ranks: Sequence[Mapping[str, Any]], simulated: float, caution: str | None = None) -> Metrics:
    """Convert times of steps to ratios, of medians and of least times.

    Args:
        of_ranks: results of :func:`measure` by rank.
        simulated: see :func:`simulated_ratio`.
        caution: reservation about these figures.
    """
    weights = 1e3 * statistics.mean(result["weights"] for result in of_ranks)
    median = {name: 1e3 * timing.median for name, timing in of_ranks[0]["times"].items()}
    least = {name: 1e3 * timing.wall for name, timing in of_ranks[0]["times"].items()}
    return {
        "split_backward_removed": (median["whole"] - median["split"]) / (2 * (len(of_ranks) - 1) * weights),
        "step_ratio": median["split"] / median["whole"],
        "step_ratio_least": least["split"] / least["whole"],
        "step_ratio_simulated": simulated,
        "milliseconds_median": median,
        "milliseconds": least,
        "chunk_weight_gradients_milliseconds": weights,
        "deviation": max(result["deviation"] for result in of_ranks),
        "waiting_bytes": [result["waiting"] for result in of_ranks],
        **({"caution": caution} if caution else {}),
    }


def measure(chunks: int, sizes: Sizes) -> dict[str, Any]:
    """Return times of both variants, the same on all ranks, and of a chunk's weight gradients."""
    from mindspeed_dsa.features.pipeline.split_backward.playing import Player
    from mindspeed_dsa.session import current

    step = dense_step(chunks, sizes, SWITCH)
    seconds: list[float] = []
    variants = {"whole": lambda: step(_whole()), "split": lambda: step(_timed(seconds))}
    deviates = deviation(variants["split"](), variants["whole"]())
    seconds.clear()
    times = minima(variants, sizes.rounds)
    session = current()
    assert session is not None
    most = session.contexts["split-backward"].state(Player).most
    dist.barrier()
    return {
        "deviation": deviates,
        "times": times,
        "weights": statistics.median(seconds),
        "waiting": most[1],
    }


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    from mindspeed_dsa.features.pipeline.split_backward.playing import Player

    with mock.patch.object(Player, "begins", return_value=False):
        yield


@contextlib.contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    from mindspeed_dsa.features.pipeline import waiting_gradients

    original = waiting_gradients.give

    def give(queue: Any) -> None:
        begin = time.perf_counter()
        original(queue)
        seconds.append(time.perf_counter() - begin)

    with mock.patch.object(waiting_gradients, "give", give):
        yield
