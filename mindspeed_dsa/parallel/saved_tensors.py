"""Marks of saved tensors for whoever moves them: freed storage, and parameters that come back as copies.

*Freed storage.* The bytes of some storages are freed after forward and computed, or gathered, again in
backward. By the time they would be copied they are gone, and they are written to the same memory again.

*Look-alikes.* Whatever hooks return for a saved parameter, autograd makes a new tensor of it. Megatron's
gradient accumulation fusion keeps attributes on the parameter: the gradient's buffer, and a mark that the
gradient is in it already, which data parallelism reads. A linear layer's backward therefore asks for the
parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

# -- freed storage -----------------------------------------------------------------------------

_freed: WeakSet[Any] = WeakSet()


def mark_freed(output: Tensor) -> None:
    """Record that the memory of ``output`` is going to be freed and filled again."""
    _freed.add(output.untyped_storage())


def is_freed(storage: Any) -> bool:
    """Return whether :func:`mark_freed` has been called for this memory.

    Args:
        storage: a ``torch.UntypedStorage``.
    """
    return storage in _freed


def bytes_of(storage: Any) -> Tensor:
    """Return all bytes of a ``torch.UntypedStorage``, as a uint8 tensor on the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def mark_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``checkpoint`` of Megatron's ``CheckpointWithoutOutput``."""

    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        outputs = original(self, run_function, *args)
        for output in (outputs,) if isinstance(outputs, Tensor) else outputs:
            mark_freed(output)
        return outputs

    return checkpoint


# -- look-alikes of parameters -----------------------------------------------------------------

_by_address: WeakValueDictionary[int, Parameter] = WeakValueDictionary()


def remember_parameter(parameter: Parameter) -> None:
    """Note a parameter that hooks are about to take from autograd."""
    _by_address[parameter.data_ptr()] = parameter


def parameter_of(saved: Tensor) -> Tensor:
    """Return the parameter that ``saved`` is a look-alike of; ``saved`` itself if it is none."""
    parameter = _by_address.get(saved.data_ptr())
    if parameter is None or _place(parameter) != _place(saved):
        return saved
    return parameter


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.storage_offset(), tensor.size(), tensor.stride()


def with_own_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``backward`` of Megatron's linear function."""

    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return original(_WithParameters(ctx) if ctx.gradient_accumulation_fusion else ctx, grad_output)

    return backward


class _WithParameters:
    """Autograd context whose saved parameters are the parameters themselves."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(None if saved is None else parameter_of(saved) for saved in self._ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
