"""Threads that share a process's reading, converting and writing of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

THREADS = 2
"""Each holds a tensor. While one waits for the disk or the kernel copies for it, another computes."""
Work = TypeVar("Work")
Result = TypeVar("Result")


def in_threads(do: Callable[[Work], Result], works: Iterable[Work]) -> Iterator[Result]:
    """Yield the results of a function in the order of its arguments; the first problem is raised.

    Torch computes with one thread in each of these: their tensors are small, and handing halves of every
    operation to another core takes longer than the operation.

    Args:
        do: function that several threads call.
        works: its arguments.
    """
    of_torch = torch.get_num_threads()
    pool = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(do, works)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(of_torch)  # also of threads that are made later
