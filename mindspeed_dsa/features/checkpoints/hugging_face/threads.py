"""Threads that share a process's reading, converting and writing of weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

THREADS = 2
"""Each holds a tensor. While one waits for the disk or the kernel copies for it, another computes."""
Work = TypeVar("Work")


def in_threads(do: Callable[[Work], None], works: Iterable[Work]) -> None:
    """Do something with each of several, in any order; the first problem ends it, and is raised.

    Torch computes with one thread in each of these: their tensors are small, and handing halves of every
    operation to another core takes longer than the operation.

    Args:
        do: called from several threads.
        works: what it is called with.
    """
    of_torch = torch.get_num_threads()
    pool = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for _ in pool.map(do, works):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(of_torch)  # also of threads that are made later


def one_at_a_time(call: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that several threads may call: such as a progress bar's."""
    lock = threading.Lock()

    def locked(done: int) -> None:
        with lock:
            call(done)

    return locked
