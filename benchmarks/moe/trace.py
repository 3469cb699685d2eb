"""Trace of a MoE layer's step, with its matmuls and transfers."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.moe.overlap import SWITCH, way
from benchmarks.moe.problem import QUICK, Sizes, layer, start, step_of
from benchmarks.tp_overlap import picture
from benchmarks.tp_overlap.trace import Span, recorded, without_queueing

_NAMES = {"all_to_all_single": "all-to-all", "all_gather_into_tensor": "counts"}


def write(link: str, quick: bool, path: Path) -> None:
    """Record a stock and an overlapped step; write ``path``, and an image next to it."""
    with LinkBed(2, link) as bed:
        found = bed.run("benchmarks.moe.trace:record", sizes=QUICK if quick else Sizes())
    picture.write(found, path, "a MoE layer")


def record(sizes: Sizes) -> dict[str, list[Span]]:
    """Return this rank's spans of one forward and backward, by variant."""
    start(**SWITCH)
    built = layer(sizes)
    step = step_of(built, sizes)

    def kind(left: Tensor, right: Tensor) -> str:
        if sizes.tokens in (left.size(0), left.size(-1)):
            return "shared expert"
        return "weight gradients" if left.stride(0) == 1 else "experts"  # one factor is transposed

    by_variant = {}
    for name in ("stock", "overlapped"):
        with way(name):
            for _ in range(2):  # warm-up: allocate memory
                step()
            dist.barrier()
            with recorded(_NAMES, kind) as spans:
                step()
            by_variant[name] = without_queueing(spans)
    return by_variant
