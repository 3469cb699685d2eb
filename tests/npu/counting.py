"""What code asks of an NPU beside its operators: reads by the host, work for the AI CPU, copies, fp64.

``with counted() as counts:`` watches every call of PyTorch in it, on CPU tensors that stand for a device's.
Which tensors do is found from where they come from:

* a factory without ``device=`` makes a tensor of the host, and so does ``.cpu()``;
* a factory with it, ``.to(device)`` and whatever was there before make tensors of the device;
* results are the host's only if all that went in is the host's.

Inside of torch_npu's operators nothing is counted: what stands in for a kernel is no part of our code. Each
event knows the line of the package that caused it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ROOT = f"{Path(__file__).parents[2]}{os.sep}"
_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_LONG = frozenset((torch.int64,))
_EVERY = None
# Operators of ATen that Atlas A2 and A3 have for the vector and cube units of some dtypes only (the lists of
# AI Core dtypes in CANN's ops-math): where the first result has one of these, the AI CPU computes it.
_AI_CPU: dict[str, frozenset[torch.dtype] | None] = {
    "sort": _INTEGERS,
    "topk": _LONG,
    "cumsum": _LONG,
    "cumprod": _LONG,
    "searchsorted": _EVERY,
    "bucketize": _EVERY,
    "floor_divide": _LONG,
    "unique_consecutive": _EVERY,
    "_unique2": _EVERY,
}
# Sizes of results depend on contents, so that the host waits for them.
_SIZED_BY_CONTENTS = frozenset(
    ("nonzero", "masked_select", "unique_consecutive", "_unique2", "repeat_interleave", "bincount")
)
_READS = frozenset(("_local_scalar_dense", "is_nonzero", "equal", "allclose"))
_COPIES = frozenset(("clone", "copy_", "cat", "stack", "_to_copy", "constant_pad_nd", "repeat"))
_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        *("arange", "as_tensor", "empty", "empty_strided", "eye", "from_numpy", "full", "linspace", "ones"),
        *("rand", "randint", "randn", "randperm", "tensor", "tril_indices", "triu_indices", "zeros"),
    )
)


@dataclass(frozen=True)
class Event:
    """One thing that was counted."""

    what: str
    """The operator."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: str
    """``file:line`` of the package, or of the test."""

    @property
    def bytes(self) -> int:
        """Of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.what} of {list(self.shape)} {str(self.dtype).removeprefix('torch.')} at {self.where}"


@dataclass
class Counts:
    """What was seen, in order."""

    host_reads: list[Event] = field(default_factory=list)
    """The host waits for the device."""
    uploads: list[Event] = field(default_factory=list)
    """Tensors that go from the host to the device."""
    ai_cpu: list[Event] = field(default_factory=list)
    """Sorts and sums of integers and searches, which the device's own few processor cores compute."""
    copies: list[Event] = field(default_factory=list)
    """Copies, conversions and joins of at least ``smallest_copy`` bytes."""
    doubles: list[Event] = field(default_factory=list)
    """Results in fp64."""

    def told(self, kind: str) -> str:
        """One line for each event of a kind, for the message of an assertion."""
        return "\n".join(map(str, getattr(self, kind)))


@contextmanager
def counted(smallest_copy: int = 0) -> Iterator[Counts]:
    """Count what happens in the block.

    Args:
        smallest_copy: bytes from which on a copy counts.
    """
    watch = _Watch(Counts(), smallest_copy)
    with _Functions(watch), _Operators(watch):
        yield watch.counts


class _Watch:
    """Where tensors are, and what was counted; both modes below share it."""

    def __init__(self, counts: Counts, smallest_copy: int) -> None:
        self.counts, self.smallest_copy = counts, smallest_copy
        self.hidden = False
        """Whether an operator of torch_npu is running."""
        self.making_host = False
        """Whether a factory without a device is."""
        # Storages of the host; kept, so that no address comes twice.
        self._of_host: dict[int, Any] = {}

    def on_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._of_host

    def put_on_host(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._of_host[storage._cdata] = storage

    def add(self, kind: str, what: str, tensor: Tensor) -> None:
        event = Event(what, tuple(tensor.shape), tensor.dtype, _where())
        getattr(self.counts, kind).append(event)


class _Functions(TorchFunctionMode):
    """What is seen in Python only: which way tensors go, and what CPU tensors do without an operator."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self.watch
        if watch.hidden:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func in _FACTORIES:
            return self._make(func, args, kwargs)
        if first is not None and name in ("cpu", "tolist", "numpy") and watch.on_device(first):
            watch.add("host_reads", name, first)
            if name != "cpu":
                return func(*args, **kwargs)
        if first is not None and (name == "cpu" or (name == "to" and "cpu" in (*args, *kwargs.values()))):
            if name == "to" and watch.on_device(first):
                watch.add("host_reads", name, first)
            return self._copied_to_host(first, func, args, kwargs)
        if (
            first is not None
            and name in ("to", "npu")
            and not watch.on_device(first)
            and _device_in(args, kwargs)
        ):
            watch.add("uploads", name, first)
            watch.hidden = True
            try:
                return func(*args, **{**kwargs, "copy": True}) if name == "to" else func(*args, **kwargs)
            finally:
                watch.hidden = False
        return func(*args, **kwargs)

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        watch = self.watch
        given = kwargs.get("device") is not None
        if given and func in (torch.tensor, torch.as_tensor) and not _device_tensor(watch, args):
            made = func(*args, **kwargs)
            watch.add("uploads", func.__name__, made)
            return made
        watch.making_host = not given
        try:
            made = func(*args, **kwargs)
        finally:
            watch.making_host = False
        if not given and not _device_tensor(watch, args):
            watch.put_on_host(made)
        return made

    def _copied_to_host(self, tensor: Tensor, func: Any, args: Any, kwargs: Any) -> Tensor:
        self.watch.hidden = True
        try:
            made: Tensor = func(*args, **kwargs)
            if made.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                made = made.clone()
        finally:
            self.watch.hidden = False
        self.watch.put_on_host(made)
        return made


class _Operators(TorchDispatchMode):
    """What reaches ATen, from C++ and from backward passes too."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self.watch
        if watch.hidden:
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "npu":
            watch.hidden = True
            try:
                return func(*args, **kwargs)
            finally:
                watch.hidden = False
        results = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        of_host = not any(map(watch.on_device, inputs)) if inputs else watch.making_host
        if of_host:
            for tensor in made:
                watch.put_on_host(tensor)
        else:
            self._count(func.overloadpacket.__name__, func, inputs, made)
        return results

    def _count(self, name: str, func: Any, inputs: list[Tensor], made: list[Tensor]) -> None:
        if not (inputs or made):
            return  # such as the type of a sum
        watch = self.watch
        like = (inputs or made)[0]
        masked = name in ("index", "index_put", "index_put_") and any(
            one.dtype in (torch.bool, torch.uint8) for one in inputs[1:]
        )
        if name in _READS or (name in _SIZED_BY_CONTENTS and inputs) or masked:
            watch.add("host_reads", f"{name} by a mask" if masked else name, like)
        rounds = name == "div" and func._overloadname.endswith("_mode")
        which = _LONG if rounds else _AI_CPU.get(name, frozenset())
        if which is None or (made and made[0].dtype in which):
            watch.add("ai_cpu", name, like)
        if name in _COPIES and made and _bytes(made[0]) >= max(1, watch.smallest_copy):
            watch.add("copies", name, made[0])
        if made and made[0].dtype == torch.float64:
            watch.add("doubles", name, made[0])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _device_in(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a device was named: a tensor of which it takes the device too."""
    given = [*tuple(args)[1:], *kwargs.values()]
    return any(isinstance(one, (torch.device, Tensor)) for one in given)


def _device_tensor(watch: _Watch, args: Any) -> bool:
    return any(isinstance(leaf, Tensor) and watch.on_device(leaf) for leaf in tree_leaves(args))


def _where() -> str:
    """The innermost line outside of PyTorch and of this file."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and name.startswith(_ROOT) and "site-packages" not in name:
            return f"{name.removeprefix(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a backward pass"
