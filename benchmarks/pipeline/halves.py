"""Steps with tokens of MoE layers in two halves, EP2 without a pipeline: what of the transfers is hidden."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks.linkbed import LinkBed
from benchmarks.moe.problem import deviation, minima, start
from benchmarks.pipeline.pairs import QUICK, Sizes, step_of
from benchmarks.registry import Metrics

SWITCHES = {"moe_batch_overlap": True, "moe_alltoall_overlap_comm": True}
SIZES = Sizes(microbatches=1, rounds=4)
"""Nothing here depends on the number of microbatches."""
VARIANTS = ("stock", "whole, overlapped", "halves", "no transfers")


def run(link: str, quick: bool) -> Metrics:
    """The cell's entries."""
    with LinkBed(2, link) as bed:
        found = bed.run("benchmarks.pipeline.halves:measure", sizes=QUICK if quick else SIZES)[0]
    print(f"halves: {found}", file=sys.stderr, flush=True)
    wall = {name: 1e3 * timing.wall for name, timing in found["times"].items()}
    exposed = wall["stock"] - wall["no transfers"]
    return {
        "batch_overlap_speedup": wall["stock"] / wall["halves"],
        "batch_overlap": {
            "measured_choice": found["choice"],
            "speedup_of_overlapped_whole": wall["stock"] / wall["whole, overlapped"],
            "a2a_hidden_fraction": (wall["stock"] - wall["halves"]) / exposed,
            "exposed_over_step": exposed / wall["stock"],
            "milliseconds": wall,
            "processor_milliseconds": {name: 1e3 * each.processor for name, each in found["times"].items()},
            "deviation": found["deviation"],
        },
    }


def measure(sizes: Sizes) -> dict[str, Any]:
    """What the layers chose in their first step, and times of a step's variants; the same on all ranks."""
    from mindspeed_dsa.features.moe.batch_overlap import layer

    start(**SWITCHES)
    step = step_of(sizes)

    def variant(name: str) -> Callable[[], Any]:
        def work() -> Any:
            with _way(name):
                return step(name)

        return work

    step("measures")
    (choice,) = set(layer._ways.values())
    works = {name: variant(name) for name in VARIANTS}
    expected = works["stock"]()
    worst = max(deviation(works[name](), expected) for name in VARIANTS[1:3])
    return {"choice": choice, "deviation": worst, "times": minima(works, sizes.rounds)}


@contextlib.contextmanager
def _way(name: str) -> Iterator[None]:
    """How layers work in the block: stock's way, or as ``--moe-alltoall-overlap-comm`` or halves have it."""
    from mindspeed_dsa.features.moe.alltoall_overlap import layer as whole
    from mindspeed_dsa.features.moe.batch_overlap import layer as halves

    with contextlib.ExitStack() as stack:
        token = halves._measured.set("interleaved" if name == "halves" else "whole")
        stack.callback(halves._measured.reset, token)
        if name != "whole, overlapped":
            stack.enter_context(mock.patch.object(whole, "_is_served", return_value=False))
        yield
