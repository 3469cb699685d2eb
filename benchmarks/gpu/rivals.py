"""Sparse attention of this library and of other projects on the same tensors, with cold and warm caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.dsa import cuda
from benchmarks.dsa.floor import attention_flops
from benchmarks.dsa.problem import Sizes
from benchmarks.gpu.projects import OURS, PROJECTS, Directions, Problem
from benchmarks.parts import Tell
from benchmarks.registry import Metrics
from benchmarks.released import MODELS

DEVIATION = 2e-2
"""Relative distance of bf16 results from ours by norm above which nothing is timed."""
_ROUNDS, _FEW, _LONG = 7, 3, 0.1
"""Timed calls: 7, or 3 if a call takes more than 0.1 s."""
_CACHE = 2**28
"""Bytes written between calls: several times the L2 cache of every GPU."""
_ENDED = "the part's time was up"


@dataclass(frozen=True)
class Cell:
    """One problem.

    Attributes:
        length: number of rows, and of keys.
        heads: attention's heads.
        full: whether rows select among all keys, instead of keys up to their own.
        ascending: whether a row's keys ascend, instead of a random order.
        shared: fraction of keys that a row shares with the next one; None for independent rows.
    """

    length: int
    heads: int
    full: bool = False
    ascending: bool = True
    shared: float | None = None

    @property
    def selection(self) -> str:
        """Description of the selection."""
        shared = [] if self.shared is None else [f"neighbours share {self.shared}"]
        rows = "full rows" if self.full else "causal rows"
        return ", ".join([rows, "ascending" if self.ascending else "random order", *shared])

    @property
    def name(self) -> str:
        """Cell's name in the figures."""
        return f"S{self.length}_H{self.heads}, {self.selection}"


def cells(quick: bool = False) -> list[Cell]:
    """Return all cells, the most important first: they are measured while time is left.

    Args:
        quick: one small cell for each kind of selection.
    """
    if quick:
        return list(_selections(Cell(4096, 64)))
    first = [Cell(length, heads) for length in (8192, 16384, 32768) for heads in (64, 128)]
    other = [Cell(length, 16) for length in (8192, 32768)]
    short, long = (
        [Cell(length, heads) for length in lengths for heads in (64, 16, 128)]
        for lengths in ((4096, 16384), (65536, 131072))
    )
    ordered = [*first, *other]
    ordered += [each for cell in first[:2] for each in _selections(cell)]
    ordered += [*short, *long]
    ordered += [each for cell in first[2:] + other for each in _selections(cell)]
    return list(dict.fromkeys(ordered))


def _selections(cell: Cell) -> Iterator[Cell]:
    yield cell
    yield replace(cell, shared=0.8)
    yield replace(cell, full=True, ascending=False)  # other projects publish figures of this one
    yield replace(cell, ascending=False)
    yield replace(cell, full=True)


def run(quick: bool, seconds: float, tell: Tell, device: str = "cuda") -> Metrics:
    """Return figures, or the reason for their absence, under ``cells`` by name, direction and project.

    Milliseconds and TFLOP/s are with warm caches; ``cold_*`` follow a write that is larger than any cache.
    ``apart`` is the distance of a project's result from ours.

    Args:
        quick: small problems.
        seconds: time limit.
        tell: callback that gets all figures so far, after each cell.
        device: device to run on.
    """
    # A cell that begins before the deadline has the last 15 % of the time to finish.
    deadline = time.monotonic() + 0.85 * seconds
    peak = cuda.matmul_rate(_ROUNDS)
    absent = {name: project.absence for name, project in PROJECTS.items() if project.absence}
    measured: dict[str, Metrics | str] = {}
    figures: dict[str, Any] = {"matmul_tflops": peak / 1e12, "absent": absent, "cells": measured}
    for cell in cells(quick):
        if time.monotonic() > deadline:
            measured[cell.name] = _ENDED
            continue
        try:
            sizes = Sizes.of(MODELS["deepseek-v3.2"], length=cell.length, heads=cell.heads)
            problem = Problem(sizes, device, cell.shared, cell.full, cell.ascending)
            measured[cell.name] = compared(problem, peak, deadline)
            del problem
        except torch.cuda.OutOfMemoryError:
            measured[cell.name] = "does not fit into the memory of the device"
        _give_back()
        tell(figures)
    return figures


def compared(problem: Problem, peak: float, deadline: float) -> dict[str, Any]:
    """Return the figures of one problem by direction and project.

    Args:
        problem: problem with our results.
        peak: operations per second of a matmul in this process.
        deadline: time of :func:`time.monotonic` after which nothing begins.
    """
    flops = attention_flops(problem.sizes, problem.pairs)
    figures: dict[str, Any] = {"forward": {}, "backward": {}}
    builders: dict[str, Callable[[Problem], Directions]] = {OURS: lambda problem: problem.ours}
    builders |= {name: project.calls for name, project in PROJECTS.items() if project.absence is None}
    for name, build in builders.items():
        calls = _tried(lambda build=build: build(problem))
        if isinstance(calls, str):
            figures["forward"][name] = calls
            continue
        for direction, call in calls.items():

            def measure(direction: str = direction, call: Any = call) -> dict[str, float]:
                if time.monotonic() > deadline:
                    raise TimeoutError(_ENDED)
                apart = problem.apart(direction, call())
                # This form also refuses NaN.
                if not apart <= DEVIATION:
                    raise ValueError(f"differs from ours by {apart:.1e}: nothing is timed")
                return {**_figures(call, flops[direction], peak), "apart": apart}

            figures[direction][name] = _tried(measure)
            _give_back()
    return figures


def _figures(call: Callable[[], object], needed: float, peak: float) -> dict[str, float]:
    rounds = _ROUNDS if cuda.seconds(call, 1) < _LONG else _FEW
    warm = cuda.seconds(call, rounds, before=call)
    cache = torch.empty(_CACHE, dtype=torch.int8, device="cuda" if torch.cuda.is_available() else "cpu")
    cold = cuda.seconds(call, rounds, before=cache.zero_)
    return {
        "ms": warm * 1e3,
        "tflops": needed / warm / 1e12,
        "fraction_of_matmul": needed / warm / peak,
        "cold_ms": cold * 1e3,
        "cold_tflops": needed / cold / 1e12,
    }


def _tried(function: Callable[[], Any]) -> Any:
    """Return the function's result, or its error as a sentence."""
    # An error costs only the figures of the kernel that raised it.
    try:
        return function()
    except torch.cuda.OutOfMemoryError:
        return "does not fit into the memory of the device"
    except (TimeoutError, ValueError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def _give_back() -> None:
    """Give memory back to the device, for the allocators of other projects."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
