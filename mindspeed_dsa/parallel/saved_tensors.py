"""Registry of saved tensors that need special care when features such as offloading move them.

*Freed storage.* Some storages are freed after forward, and refilled in backward by recomputation or a gather.
They must not be offloaded: their bytes can be gone before the copy reads them, and they are refilled anyway.

*Copies of parameters.* If saved-tensor hooks handle a saved parameter, autograd returns a new tensor in
backward. Megatron's gradient accumulation fusion needs the attributes ``main_grad`` and
``grad_added_to_main_grad`` of the parameter itself. A linear layer's backward therefore looks up the
parameter.
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
    """Mark the storage of ``output`` as one that will be freed and refilled."""
    _freed.add(output.untyped_storage())


def is_freed(storage: Any) -> bool:
    """Return whether :func:`mark_freed` has marked this storage.

    Args:
        storage: ``torch.UntypedStorage``.
    """
    return storage in _freed


def bytes_of(storage: Any) -> Tensor:
    """Return all bytes of a ``torch.UntypedStorage`` as a uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def mark_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CheckpointWithoutOutput.checkpoint`` to mark its outputs' storages as freed."""

    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        outputs = original(self, run_function, *args)
        for output in (outputs,) if isinstance(outputs, Tensor) else outputs:
            mark_freed(output)
        return outputs

    return checkpoint


# -- copies of parameters ----------------------------------------------------------------------

_by_address: WeakValueDictionary[int, Parameter] = WeakValueDictionary()


def remember_parameter(parameter: Parameter) -> None:
    """Register a parameter for :func:`parameter_of`, before hooks replace its saved tensor."""
    _by_address[parameter.data_ptr()] = parameter


def parameter_of(saved: Tensor) -> Tensor:
    """Return the parameter that ``saved`` is a copy of, or ``saved`` itself."""
    # Hooks return a tensor on the parameter's memory, so the address identifies it.
    parameter = _by_address.get(saved.data_ptr())
    if parameter is None or _place(parameter) != _place(saved):
        return saved
    return parameter


def _place(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.storage_offset(), tensor.size(), tensor.stride()


def with_own_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``backward`` of Megatron's linear function to read parameters instead of their copies."""

    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return original(_WithParameters(ctx) if ctx.gradient_accumulation_fusion else ctx, grad_output)

    return backward


class _WithParameters:
    """Proxy of an autograd context; its ``saved_tensors`` are the parameters instead of their copies."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(None if saved is None else parameter_of(saved) for saved in self._ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
