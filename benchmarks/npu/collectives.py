"""HCCL's collectives by dtype on one rank: correctness and bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa import platforms

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)
_BYTES, _QUICK_BYTES = 64 << 20, 1 << 14
"""Bytes of each rank's part of a whole tensor."""
_ROUNDS = 5


def run(quick: bool) -> dict[str, Any]:
    """Return ``ms`` and ``gb_s`` of a rank's links by collective and dtype, or an ``error``.

    Needs a process group. Bandwidth counts the bytes that a rank has to send at least: for an all-reduce
    twice as many as for a gather.
    """
    figures = {}
    for dtype in DTYPES:
        for name, make in COLLECTIVES.items():
            row = f"{name}, {str(dtype).removeprefix('torch.')}"
            try:
                figures[row] = _measured(
                    make, dtype, 1 if quick else _ROUNDS, _QUICK_BYTES if quick else _BYTES
                )
            except Exception as error:  # HCCL refuses dtypes by their name
                figures[row] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    return figures


def _measured(make: Callable[..., Any], dtype: torch.dtype, rounds: int, size: int) -> dict[str, Any]:
    platform, ranks, rank = platforms.current(), dist.get_world_size(), dist.get_rank()
    # A multiple of the ranks, so that all parts are equal.
    count = size // dtype.itemsize // ranks * ranks
    # Rank r holds r + 1 in every element, so that all results are known.
    call, result, expected, share = make(torch.full((count,), rank + 1, dtype=dtype, device=platform.device))
    times = []
    for number in range(rounds + 1):
        begin, end = platform.new_event(timing=True), platform.new_event(timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number == 0:
            wrong = int((result != expected).sum())
            if wrong:
                return {"error": f"{wrong} of {result.numel()} elements are not what they should be"}
        else:
            times.append(begin.elapsed_time(end))
    taken = statistics.median(times)
    # Bytes per ms / 1e6 = GB/s.
    return {"ms": taken, "gb_s": count * dtype.itemsize * share / max(taken, 1e-6) / 1e6}


def _sum(ranks: int) -> int:
    return ranks * (ranks + 1) // 2


def _all_reduce(own: Tensor) -> Any:
    """Return a call, its result, the expected result, and the sent share of the tensor's bytes."""
    ranks = dist.get_world_size()
    out = own.clone()

    def call() -> None:
        # The all-reduce is in place and must start from the same values each time.
        out.copy_(own)
        dist.all_reduce(out)

    return call, out, torch.full_like(own, _sum(ranks)), 2 * (ranks - 1) / ranks


def _all_gather(own: Tensor) -> Any:
    ranks = dist.get_world_size()
    part = own[: own.numel() // ranks].contiguous()
    out = torch.empty_like(own)
    expected = torch.arange(1, ranks + 1, device=own.device).repeat_interleave(part.numel()).to(own.dtype)
    return lambda: dist.all_gather_into_tensor(out, part), out, expected, (ranks - 1) / ranks


def _reduce_scatter(own: Tensor) -> Any:
    ranks = dist.get_world_size()
    out = torch.empty_like(own[: own.numel() // ranks])
    expected = torch.full_like(out, _sum(ranks))
    return lambda: dist.reduce_scatter_tensor(out, own), out, expected, (ranks - 1) / ranks


def _all_to_all(own: Tensor) -> Any:
    ranks = dist.get_world_size()
    out = torch.empty_like(own)
    each = own.numel() // ranks
    expected = torch.arange(1, ranks + 1, device=own.device).repeat_interleave(each).to(own.dtype)
    return lambda: dist.all_to_all_single(out, own), out, expected, (ranks - 1) / ranks


def _broadcast(own: Tensor) -> Any:
    out = own.clone()
    return lambda: dist.broadcast(out, 0), out, torch.ones_like(own), 1.0


def _send_and_receive(own: Tensor) -> Any:
    """Send to the next rank and receive from the previous one, as stages of a pipeline do."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    out = torch.empty_like(own)

    def call() -> None:
        both = [
            dist.P2POp(dist.isend, own, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, out, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return call, out, torch.full_like(own, (rank - 1) % ranks + 1), 1.0


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "broadcast": _broadcast,
    "send and receive": _send_and_receive,
}
