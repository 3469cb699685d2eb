"""Trace of a DSA layer's step on two context parallel ranks, with its products and transfers."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from benchmarks.context_parallel.step import QUICK, Sizes, built
from benchmarks.linkbed import LinkBed
from benchmarks.tp_overlap import picture
from benchmarks.tp_overlap.trace import Span, recorded, without_queueing
from mindspeed_dsa.parallel import names

_SIZES = Sizes(length=4096, topk=256, hidden=1024)
"""Shorter than the timed sizes: with longer sequences attention would dwarf the projections."""
_CONTENTS = {"keys of the sequence": "all-gather", "gradient of keys of the sequence": "reduce-scatter"}
"""Collectives that messages between pairs of ranks stand for on a CPU, by the name of their content."""
_NAMES = {"batch_isend_irecv": lambda: _CONTENTS[names.current().what]}


def write(link: str, quick: bool, path: Path) -> None:
    """Record a step; write its trace to ``path``, and an image next to it."""
    with LinkBed(2, link) as bed:
        found = bed.run("benchmarks.context_parallel.trace:record", sizes=QUICK if quick else _SIZES)
    picture.write(found, path, "a DSA layer on two context parallel ranks")


def record(sizes: Sizes) -> dict[str, list[Span]]:
    """Return this rank's spans of one forward and backward."""
    step = built(sizes, dist.get_world_size())
    for _ in range(2):  # warm-up: allocate memory
        step()
    dist.barrier()
    with recorded(_NAMES) as spans:
        step()
    return {"CP2": without_queueing(spans)}
