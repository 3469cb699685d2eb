"""``tensor[mask] = number`` inside of Megatron's own functions, as one elementwise operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _FillingByMask(TorchFunctionMode):
    """Assigns a number where a mask is true by selecting, for every element, the number or what was there.

    No product with the mask: it would leave a NaN where a masked element is not finite.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__setitem__:
            tensor, index, value = args
            mask = _mask_of(tensor, index)
            if mask is not None and isinstance(value, (int, float)):
                tensor.masked_fill_(mask, value)
                return None
        return func(*args, **(kwargs or {}))


def _mask_of(tensor: Tensor, index: Any) -> Tensor | None:
    """The mask of whole rows that an index is, with an axis for each of ``tensor``; None if it is another."""
    mask, *rest = index if isinstance(index, tuple) else (index,)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or any(each != slice(None) for each in rest):
        return None
    if mask.shape != tensor.shape[: mask.dim()]:
        return None
    return mask.reshape(mask.shape + (1,) * (tensor.dim() - mask.dim()))


def fill_by_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of Megatron's, whose body stays as it is."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which turns such an assignment into a selection by itself
            return original(*args, **kwargs)
        with _FillingByMask():
            return original(*args, **kwargs)

    return run
