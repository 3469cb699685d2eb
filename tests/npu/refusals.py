"""Refusals of a device that gloo and a CPU do not have, emulated in a ``with`` block.

* :func:`hccl`: reductions of dtypes that HCCL does not reduce, and an operator that communicates by itself
  during an unfinished collective of its communicator (:func:`require_idle`).
* :func:`blocked_storages`: resizing a storage in one of the device's internal formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

# torch_npu's checkSupportedDataType, for Atlas A2 and A3.
REDUCED = frozenset(
    (torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
)
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_MOVING = ("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast")
_in_flight: dict[Any, list[_Work]] = {}


class _Work:
    """An unfinished collective; waiting for it orders the stream after it."""

    def __init__(self, work: Any, group: Any) -> None:
        self._work, self._others = work, _in_flight.setdefault(group, [])
        self._others.append(self)

    def wait(self, *args: Any) -> Any:
        if self in self._others:
            self._others.remove(self)
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def hccl() -> Iterator[None]:
    """Make the collectives of ``torch.distributed`` refuse the calls that HCCL refuses."""
    with ExitStack() as stack:
        for name in (*_REDUCING, *_MOVING):
            stack.enter_context(mock.patch.object(dist, name, _as_hccl(getattr(dist, name), name)))
        yield
        left = {group: len(works) for group, works in _in_flight.items() if works}
        _in_flight.clear()
        assert not left, f"nobody has waited for {left}"


def _as_hccl(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
            if name in _REDUCING and isinstance(tensor, Tensor) and tensor.dtype not in REDUCED:
                raise RuntimeError(f"HCCL {name}: Unsupported data type {tensor.dtype}")
        work = original(*args, **kwargs)
        group = kwargs.get("group") or dist.group.WORLD
        return _Work(work, group) if kwargs.get("async_op") else work

    return run


def require_idle(name: str, group: Any) -> None:
    """Raise ``AssertionError`` if a collective of the group is in flight."""
    works = _in_flight.get(group, [])
    assert not works, f"{name} starts beside {len(works)} collectives of its communicator"


_blocked: set[int] = set()


def in_blocks(tensor: Tensor) -> Tensor:
    """Mark a tensor as converted to the internal format of matrices (``npu_format_cast``)."""
    _blocked.add(tensor.untyped_storage()._cdata)
    return tensor


@contextmanager
def blocked_storages() -> Iterator[None]:
    """Make storages of :func:`in_blocks` refuse to be resized."""
    original = torch.UntypedStorage.resize_

    def resize(self: Any, size: int) -> Any:
        if self._cdata in _blocked:
            raise RuntimeError("resize_ of a storage in an internal format")
        return original(self, size)

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield
    _blocked.clear()
