"""Dispatch mode that computes the values of NPU tensors.

Each operator is first called on NPU tensors, so that torch_npu's C++ checks, allocates, waits and launches as
on a device. Then it is called on CPU tensors over the same memory, whose results are the values.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tests.npu.device import counts, generators
from tests.npu.device.memory import is_npu, on_host, to_npu
from tests.npu.device.values import BY_NAME

_operators = ctypes.CDLL("libopapi.so")
_runtime = ctypes.CDLL("libascendcl.so")
_open = ctypes.c_int.in_dll(_runtime, "stand_in_open")
# Storage, metadata and copies of whole memory, which torch_npu does by itself.
_NATIVE = frozenset(
    "empty empty_strided empty_like new_empty new_empty_strided empty_with_format unsafe_empty_with_format "
    "empty_with_swapped_memory detach alias set_ resize_ record_stream _local_scalar_dense lift_fresh "
    "is_pinned _pin_memory pin_memory npu_format_cast npu_format_cast_ get_npu_format _npu_format_cast "
    "get_storage_size _reshape_alias _unsafe_view view as_strided is_same_size "
    "_has_compatible_shallow_copy_type _cudnn_init_dropout_state".split()
)
# The sizes of results depend on values, which torch_npu reads: a wait.
_SIZED = frozenset(
    "nonzero masked_select unique_consecutive _unique _unique2 unique_dim bincount repeat_interleave".split()
)
_EMPTY = frozenset("empty empty_strided empty_like new_empty new_empty_strided".split())
_PLAIN = (Tensor, torch.nn.Parameter)
_COLLECTIVES = ("c10d", "_c10d_functional", "npu_custom_dist")


class StandIn(TorchDispatchMode):
    """Computes operators called on NPU tensors, in the thread that enters it and in autograd's threads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # DTensor and similar classes call operators on the tensors that they hold
        leaves = tree_leaves((args, kwargs))
        device = kwargs.get("device")
        made = device is not None and torch.device(device).type == "npu"
        if not made and not any(is_npu(x) for x in leaves):
            return func(*args, **kwargs)
        if not counts.counting():
            return _run(func, args, kwargs, leaves)
        return _counted(func, args, kwargs, leaves)


def _counted(func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
    name = func.overloadpacket.__name__
    counts.note_between(name)
    waits, pageable = counts.waits(), counts.pageable_copies()
    out = _run(func, args, kwargs, leaves)
    if name not in _NATIVE and not func.is_view:
        counts.note("launch", name)
    if counts.pageable_copies() > pageable:
        counts.note("pageable", name)
    if counts.waits() > waits or _is_sized(name, leaves):
        counts.note("wait", name)
    if counts.on_aicpu(name, out):
        counts.note("aicpu", name)
    if _falls_back(func):
        counts.note("fallback", name)
    counts.take_stock()
    return out


def _run(func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
    name = func.overloadpacket.__name__
    # A fallback of torch_npu has already computed, on copies that it has brought back.
    if name in _NATIVE or func.is_view or func.namespace in _COLLECTIVES or _falls_back(func):
        out = _native(func, args, kwargs, quiet=False)
        if (
            name in _EMPTY
            and is_npu(out)
            and type(out) in _PLAIN
            and out.is_floating_point()
            and out.dtype.itemsize > 1
        ):
            with _disable_current_modes():
                on_host(out).fill_(float("nan"))  # so that a read before the first write shows
        return out
    if _open.value:  # a collective of the current stream comes first
        _runtime.stand_in_settle(ctypes.c_void_p(torch.npu.current_stream().npu_stream))
    draws = torch.Tag.nondeterministic_seeded in func.tags
    generator = kwargs.get("generator")
    with generators.drawing(generator) if draws else nullcontext():
        if _is_sized(name, leaves):
            return tree_map(
                lambda x: to_npu(x) if isinstance(x, Tensor) else x, _on_host(func, name, args, kwargs)
            )
        native = _native(func, args, kwargs, quiet=True)
        if isinstance(native, FakeTensor):
            return native
        host = _on_host(func, name, args, kwargs)
    with _disable_current_modes():
        _take_values(func, native, host, {id(x) for x in leaves})
    # torch_npu has read a result that its operator has not written.
    return host if isinstance(native, bool) else native


def _on_host(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call the operator on CPU tensors over the NPU tensors' memory."""
    args, kwargs = tree_map(_argument, (args, kwargs))
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False
    with _disable_current_modes():
        return BY_NAME.get(name, func)(*args, **kwargs)


def _argument(value: Any) -> Any:
    if is_npu(value):
        return on_host(value)
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _take_values(func: Any, native: Any, host: Any, given: set[int]) -> None:
    """Copy results of CPU kernels to the tensors that torch_npu has allocated for them.

    Args:
        func: operator, for messages.
        native: results of torch_npu.
        host: results of CPU kernels, with the same structure.
        given: ids of arguments; values changed in place are there already.

    Raises:
        AssertionError: shapes differ.
    """
    for target, source in zip(tree_flatten(native)[0], tree_flatten(host)[0], strict=True):
        if not isinstance(target, Tensor) or id(target) in given:
            continue
        assert target.shape == source.shape, (
            f"{func}: torch_npu allocates {tuple(target.shape)}, a CPU {tuple(source.shape)}"
        )
        if target.numel():
            (on_host(target) if is_npu(target) else target).copy_(source)


def _native(func: Any, args: Any, kwargs: Any, quiet: bool) -> Any:
    """Call torch_npu.

    Args:
        func: operator or collective.
        args: positional arguments.
        kwargs: keyword arguments.
        quiet: whether its operators leave values to the mode; operators of collectives and fallbacks compute.

    Raises:
        AssertionError: an operator has no value (``operators.c``).
    """
    flag = ctypes.c_int.in_dll(_operators, "stand_in_quiet")  # one per thread
    missing = ctypes.c_char_p.in_dll(_operators, "stand_in_without_value")
    flag.value, missing.value = quiet, None
    try:
        out = func(*args, **kwargs)
    finally:
        flag.value = 0
    assert missing.value is None, f"{func} calls {missing.value!r}, which tests/npu/device/operators.c lacks"
    return out


def _is_sized(name: str, leaves: list[Any]) -> bool:
    if name in ("index", "index_put_", "_index_put_impl_"):
        return name == "index" and any(is_npu(x) and x.dtype == torch.bool for x in leaves[1:])
    return name in _SIZED


@functools.cache
def _falls_back(func: Any) -> bool:
    """Return whether torch_npu has no kernel and torch no composite of operators that torch_npu has."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(
        has(func.name(), key)
        for key in ("PrivateUse1", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    ):
        return False
    if has(func.name(), "CompositeExplicitAutogradNonFunctional"):
        # A structured operator calls its form with an ``out`` argument.
        packet = getattr(getattr(torch.ops, func.namespace), func.overloadpacket.__name__.rstrip("_"))
        outs = [getattr(packet, overload).name() for overload in packet.overloads() if "out" in overload]
        # The ``out`` form of others, for example gradients of views, is made of the operator itself.
        return not any(
            has(name, key) for name in outs for key in ("PrivateUse1", "CompositeExplicitAutograd")
        )
    return True


def _printed(original: Any) -> Any:
    """Wrap torch's printing, which disables modes, so that it prints values of NPU tensors from the host."""

    @functools.wraps(original)
    def print_tensor(tensor: Any, **more: Any) -> Any:
        return original(on_host(tensor) if is_npu(tensor) and type(tensor) in _PLAIN else tensor, **more)

    return print_tensor


_mode: StandIn | None = None


def start() -> None:
    """Compute values of NPU tensors from now on, in this thread and in autograd threads started for it."""
    global _mode
    if _mode is None:
        import torch_npu  # noqa: F401

        from tests.npu import kernels

        kernels.register()
        torch._tensor_str._str = _printed(torch._tensor_str._str)
        counts.watch(torch.npu.Event)
        counts.watch(torch.npu.Stream)
        _mode = StandIn()
        _mode.__enter__()
