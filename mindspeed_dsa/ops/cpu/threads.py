"""Shared by the CPU backends: rows of blocks worked on by threads of our own.

The products of one block are small: split over the cores each, they spend as much time waiting for one
another as working. So every thread takes whole blocks and multiplies alone. PyTorch's calls let go of the
interpreter lock, which is why threads suffice; it is also why there are few of them, with several of
PyTorch's own threads each on a large machine.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

# One call into PyTorch takes some 50 us, a tenth of which holds the interpreter lock.
_MAX_WORKERS = 8
# Up to so many intermediate numbers, calls are so short that threads of ours mostly wait for that lock.
# Beyond, they win: MKL computes small batches in one thread, and takes up to 25 times as long for a small
# product of many summands in two as in one.
_SMALL = 1 << 19

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def worker_count(numbers: float = math.inf) -> int:
    """Threads that :func:`share_out` may use: PyTorch's own number, up to a limit.

    Args:
        numbers: that are computed on the way. For few there is one thread, and PyTorch splits its calls.
    """
    return 1 if numbers <= _SMALL else min(torch.get_num_threads(), _MAX_WORKERS)


def share_out(
    items: Sequence[Item], work: Callable[[Sequence[Item]], Result], workers: int | None = None
) -> list[Result]:
    """Call ``work`` on every share of ``items`` at the same time.

    Which share an item is in depends on its position and on the number of threads alone, so sums over a
    share, and over shares in order, are deterministic. Neighbours are in different shares: where rows get
    longer, as with causal attention, all shares get equally much.

    Args:
        items: what to do, in any number.
        work: called without gradients, in another thread if there is more than one share.
        workers: number of shares if there are enough items; by default as many as there may be threads.

    Returns:
        The result for each share, in order; at least one, whose share may be empty.
    """
    shares = max(min(workers or worker_count(), len(items)), 1)
    if shares == 1:
        with torch.no_grad():
            return [work(items)]
    # Tensors made in inference mode can be written in inference mode only, and each thread has its own.
    inference = torch.is_inference_mode_enabled()

    def run(share: Sequence[Item]) -> Result:
        with torch.inference_mode(inference), torch.no_grad():
            return work(share)

    pool = _pool(worker_count(), torch.get_num_threads() // worker_count())
    return list(pool.map(run, [items[first::shares] for first in range(shares)]))


def _pool(workers: int, threads_each: int) -> ThreadPoolExecutor:
    with _pools_lock:
        pool = _pools.get((workers, threads_each))
        if pool is None:
            everyone = threading.Barrier(workers + 1)
            before = torch.get_num_threads()
            pool = ThreadPoolExecutor(
                workers, "mindspeed_dsa", initializer=_enter, initargs=(threads_each, everyone)
            )
            for _ in range(workers):
                pool.submit(int)
            everyone.wait()
            # The number is each thread's own, but the last one set is also what threads to come start with.
            torch.set_num_threads(before)
            _pools[workers, threads_each] = pool
        return pool


def _enter(threads: int, everyone: threading.Barrier) -> None:
    # The first look at the number makes it the common one; only then a number of its own stays.
    torch.get_num_threads()
    torch.set_num_threads(threads)
    everyone.wait()


def _forget_pools() -> None:
    """In a forked child: the threads stayed with the parent."""
    global _pools_lock
    _pools.clear()
    _pools_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_pools)
