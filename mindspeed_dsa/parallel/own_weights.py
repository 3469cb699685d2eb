"""A linear layer's own weight in its backward, where hooks on saved tensors hand out a look-alike.

Megatron's gradient accumulation fusion keeps attributes on the parameter: the gradient's buffer, and a mark
that the gradient is in it already, which data parallelism reads. Whatever hooks return for a saved
parameter, autograd makes a new tensor of it, without these attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.nn import Parameter

_by_address: WeakValueDictionary[int, Parameter] = WeakValueDictionary()


def remember(parameter: Parameter) -> None:
    """Hooks are about to take this parameter from autograd."""
    _by_address[parameter.data_ptr()] = parameter


def own(saved: Tensor) -> Tensor:
    """The parameter that ``saved`` is a look-alike of; ``saved`` itself if it is none."""
    parameter = _by_address.get(saved.data_ptr())
    if parameter is None or _place(parameter) != _place(saved):
        return saved
    return parameter


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.storage_offset(), tensor.size(), tensor.stride()


class _OwnWeights:
    """An autograd context whose saved parameters are the parameters themselves."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(None if saved is None else own(saved) for saved in self._ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def with_own_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``backward`` of Megatron's linear function."""

    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return original(_OwnWeights(ctx) if ctx.gradient_accumulation_fusion else ctx, grad_output)

    return backward
