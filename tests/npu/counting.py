"""Counter of costs on an NPU other than its operators: host reads, AI CPU work, copies, fp64.

``with counted() as counts:`` watches every PyTorch call in the block, on CPU tensors that emulate a device's.
The origin of a tensor decides whether it is on the host or on the device:

* a factory without ``device=`` makes a tensor on the host, and so does ``.cpu()``;
* a factory with ``device=`` and ``.to(device)`` make tensors on the device, where earlier tensors are, too;
* results are on the host only if all inputs are.

Nothing is counted inside torch_npu's operators: their CPU kernels are not part of our code. Each event has
the line of the package that caused it.
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
# ATen operators that Atlas A2 and A3 run on vector and cube units for some dtypes only (AI Core dtypes in
# CANN's ops-math). The AI CPU computes them if the first result has one of these dtypes.
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
# The size of the result depends on contents, so that the host waits for it.
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
    """A counted event."""

    what: str
    """Operator's name."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: str
    """``file:line`` in the package, or in the test."""

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.what} of {list(self.shape)} {str(self.dtype).removeprefix('torch.')} at {self.where}"


@dataclass
class Counts:
    """Events in order."""

    host_reads: list[Event] = field(default_factory=list)
    """Reads for which the host waits for the device."""
    uploads: list[Event] = field(default_factory=list)
    """Tensors copied from the host to the device."""
    ai_cpu: list[Event] = field(default_factory=list)
    """Integer sorts and sums, and searches, which the device's few processor cores compute."""
    copies: list[Event] = field(default_factory=list)
    """Copies, conversions and joins of at least ``smallest_copy`` bytes."""
    doubles: list[Event] = field(default_factory=list)
    """Results in fp64."""

    def told(self, kind: str) -> str:
        """Return one line for each event of a kind, for the message of an assertion."""
        return "\n".join(map(str, getattr(self, kind)))


@contextmanager
def counted(smallest_copy: int = 0) -> Iterator[Counts]:
    """Count events in the block.

    Args:
        smallest_copy: least bytes of a copy that counts.
    """
    watch = _Watch(Counts(), smallest_copy)
    with _Functions(watch), _Operators(watch):
        yield watch.counts


class _Watch:
    """Places of tensors and counts, shared by both modes below."""

    def __init__(self, counts: Counts, smallest_copy: int) -> None:
        self.counts, self.smallest_copy = counts, smallest_copy
        self.hidden = False
        """Whether an operator of torch_npu is running."""
        self.making_host = False
        """Whether a factory without a device is."""
        # Host storages; kept alive, so that no address is reused.
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
    """Mode for events visible only in Python: transfers, and CPU tensors' methods without an operator."""

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
        has_device = kwargs.get("device") is not None
        if has_device and func in (torch.tensor, torch.as_tensor) and not _device_tensor(watch, args):
            made = func(*args, **kwargs)
            watch.add("uploads", func.__name__, made)
            return made
        watch.making_host = not has_device
        try:
            made = func(*args, **kwargs)
        finally:
            watch.making_host = False
        if not has_device and not _device_tensor(watch, args):
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
    """Mode for operators that reach ATen, also from C++ and from backward passes."""

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
            return  # such as the dtype of a sum
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
    """Return whether the arguments name a device, directly or by a tensor."""
    given = [*tuple(args)[1:], *kwargs.values()]
    return any(isinstance(one, (torch.device, Tensor)) for one in given)


def _device_tensor(watch: _Watch, args: Any) -> bool:
    return any(isinstance(leaf, Tensor) and watch.on_device(leaf) for leaf in tree_leaves(args))


def _where() -> str:
    """Return the innermost line outside of PyTorch and of this file."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and name.startswith(_ROOT) and "site-packages" not in name:
            return f"{name.removeprefix(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a backward pass"
