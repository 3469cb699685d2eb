"""Counts of a step's costs on the device other than its operators, each with its place in the code.

:data:`kinds`: ``wait`` (the host waits for the device), ``pageable`` (a copy from unpinned host memory, which
torch_npu ends with a wait), ``fallback`` (torch_npu computes on the CPU), ``aicpu`` (on Atlas A2 and A3, CANN
has the operator in this dtype only for the AI CPU), ``launch`` (operators).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_KINDS = ("wait", "pageable", "fallback", "aicpu", "launch")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Dtypes that CANN's sources (ops-math) list for the AI CPU, but not for the AI core of Atlas A2 and A3.
_AICPU: dict[str, tuple[torch.dtype, ...] | None] = {
    "sort": _INTEGERS,
    "argsort": _INTEGERS,
    "topk": (torch.int64,),
    "cumsum": (torch.int64,),
    "cumprod": (torch.int64,),
    "floor_divide": (torch.int64,),
    "histc": _INTEGERS,
    "searchsorted": None,
    "bucketize": None,
    "bincount": None,
    "unique_consecutive": None,
    "_unique2": None,
}
_WAITS = ("sync_stream", "sync_device", "sync_event", "h2d_sync", "d2h_sync")
_SKIPPED = ("/tests/npu/device/", "/torch/", "/torch_npu/", "<")


class _Row(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("count", ctypes.c_ulong))


def _rows(library: str, symbol: str, most: int) -> dict[str, _Row]:
    found = {}
    for row in (_Row * most).in_dll(ctypes.CDLL(library), symbol):
        if row.name is None:
            break
        found[row.name.decode()] = row
    return found


_runtime = _rows("libascendcl.so", "stand_in_runtime", 32)


def waits() -> int:
    """Return how often the host has waited for the device in this process."""
    return sum(_runtime[name].count for name in _WAITS)


def pageable_copies() -> int:
    """Return how many copies to the device ended with a wait."""
    return _runtime["h2d_sync"].count


def collectives() -> dict[str, int]:
    """Return calls of HCCL by name."""
    return {name: row.count for name, row in _rows("libascendcl.so", "stand_in_hccl", 32).items()}


@dataclass
class Counts:
    """Events during :func:`counted`.

    Attributes:
        events: counts by kind, operator and place; a place is the innermost two frames outside of torch.
    """

    events: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def of(self, kind: str, place: str = "") -> int:
        """Return the number of events of a kind at places that contain a text."""
        assert kind in _KINDS, f"{kind} is no kind of count"
        return sum(n for (what, _, where), n in self.events.items() if what == kind and place in where)

    def table(self, *kinds: str) -> str:
        """Return one line for each operator and place, most frequent first."""
        rows = [(n, *key) for key, n in self.events.items() if not kinds or key[0] in kinds]
        return "\n".join(
            f"{n:6d} {what:9s} {name:28s} {where}" for n, what, name, where in sorted(rows)[::-1]
        )


_open: list[Counts] = []


@contextmanager
def counted() -> Iterator[Counts]:
    """Count events in this process, in all threads that the mode reaches."""
    counts = Counts()
    if not _open:
        take_stock()
    _open.append(counts)
    try:
        yield counts
        note_between("the end")
    finally:
        _open.remove(counts)


def counting() -> bool:
    """Return whether any :func:`counted` block is open."""
    return bool(_open)


_seen = {"wait": 0, "pageable": 0}


def take_stock() -> None:
    """Reset the baseline, so that earlier waits are not counted."""
    _seen.update(wait=waits(), pageable=pageable_copies())


def note_between(operator: str) -> None:
    """Count waits since the previous operator, for example inside ``torch.tensor``.

    Args:
        operator: name of the next operator or event.
    """
    if waits() > _seen["wait"]:
        note("wait", f"before {operator}")
    if pageable_copies() > _seen["pageable"]:
        note("pageable", f"before {operator}")
    take_stock()


def watch(kind: Any) -> None:
    """Wrap a class's ``synchronize`` (``torch.npu.Event`` or ``Stream``) to note the place of each call."""
    wait = kind.synchronize

    @functools.wraps(wait)
    def synchronize(self: Any) -> None:
        if not counting():
            return wait(self)
        name = f"{kind.__name__}.synchronize"
        note_between(name)
        wait(self)
        note("wait", name)
        return take_stock()

    kind.synchronize = synchronize


def note(kind: str, operator: str) -> None:
    """Count one event here."""
    place = where()
    for counts in _open:
        counts.events[kind, operator, place] += 1


def on_aicpu(operator: str, result: object) -> bool:
    """Return whether CANN has an operator only for the AI CPU.

    Args:
        operator: name without its overload.
        result: tensor or tuple of tensors; the first one's dtype decides.
    """
    name = operator.rstrip("_")
    if name not in _AICPU:
        return False
    first = result if isinstance(result, Tensor) else next(iter(result), None)  # type: ignore[call-overload]
    dtypes = _AICPU[name]
    return isinstance(first, Tensor) and (dtypes is None or first.dtype in dtypes)


def where() -> str:
    """Return the innermost two frames outside of torch and of the stand-in: file, line and function."""
    frames: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < 2:
        name = frame.f_code.co_filename
        if not any(part in name for part in _SKIPPED):
            short = name.rpartition("/site-packages/")[2].rpartition("/mindspeed_dsa/")
            file = f"{short[1]}{short[2]}".lstrip("/")
            frames.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(frames)
