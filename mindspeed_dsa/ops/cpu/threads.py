"""Worker threads of the CPU backends, each of which processes whole blocks.

The matmuls of one block are small: split over the cores, threads would spend as much time waiting for each
other as working. So each thread processes whole blocks. Threads suffice because PyTorch's calls release the
interpreter lock. The time that each call holds the lock limits the number of worker threads. On a large
machine each worker uses several of PyTorch's own threads.
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

# A call into PyTorch takes about 50 us, a tenth of which holds the interpreter lock:
# 8 threads hold it up to 8 / 10 of the time.
_MAX_WORKERS = 8
# Up to this many intermediate numbers, calls are so short that several threads mostly wait for the lock.
# Beyond it threads win: MKL computes small batches in one thread. For a small product with many summands it
# takes up to 25 times as long with two threads as with one.
_SMALL = 1 << 19

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def worker_count(numbers: float = math.inf) -> int:
    """Return the number of threads for :func:`share_out`: ``torch.get_num_threads()``, up to a limit.

    Args:
        numbers: count of intermediate numbers to compute. If it is small, one worker suffices and PyTorch
            parallelizes each call.
    """
    return 1 if numbers <= _SMALL else min(torch.get_num_threads(), _MAX_WORKERS)


def share_out(
    items: Sequence[Item], work: Callable[[Sequence[Item]], Result], workers: int | None = None
) -> list[Result]:
    """Call ``work`` on every share of ``items`` concurrently.

    An item's share depends only on its position and the number of threads, so sums within a share, and over
    shares in order, are deterministic. Neighboring items go to different shares: where rows get longer, as in
    causal attention, all shares get an equal amount of work.

    Args:
        items: items to process, any number.
        work: function that takes a share, a sequence of items. It is called without gradients, and in worker
            threads if there are several shares.
        workers: number of shares if there are enough items; by default :func:`worker_count`.

    Returns:
        Results of ``work``, one per share, in order. Without items there is one empty share.
    """
    shares = max(min(workers or worker_count(), len(items)), 1)
    if shares == 1:
        with torch.no_grad():
            return [work(items)]
    # Inference mode is per thread, and its tensors can be written in inference mode only.
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
            # The thread count is per thread, but the last value set is also the default of future threads.
            torch.set_num_threads(before)
            _pools[workers, threads_each] = pool
        return pool


def _enter(threads: int, everyone: threading.Barrier) -> None:
    # The first query of the thread count resets it to the default; a value set afterwards stays.
    torch.get_num_threads()
    torch.set_num_threads(threads)
    everyone.wait()


def _forget_pools() -> None:
    """Drop the pools in a forked child, which does not inherit their threads."""
    global _pools_lock
    _pools.clear()
    _pools_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_pools)
