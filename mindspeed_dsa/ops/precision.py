"""Precision of the operators: which dtypes sums and gradients have, whatever surrounds them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mindspeed_dsa.ops.npu import device as npu_device

Function = TypeVar("Function", bound=Callable[..., Any])


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context without ``torch.autocast``, which would round the fp32 products inside to 16 bits."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def outside_autocast(function: Function) -> Function:
    """Run a function without autocast on the device of its first tensor argument.

    Autocast belongs to a thread: inside of it the result would also depend on how many threads work.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                with without_autocast(value.device.type):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, run)


def total_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over all rows: fp64; fp32 on NPUs, whose vector units have no other."""
    return torch.float32 if npu_device.takes_device(device.type) else torch.float64


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products and sums: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def normalize(norm: Callable[..., Tensor], states: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Apply one of torch's norms where weights may be wider than what is normalised.

    Both types at once are slow in some of torch's kernels, refused by others, and give either of them.

    Args:
        norm: ``F.rms_norm`` or ``F.layer_norm``.
        states: ``[..., n]``.
        weight: ``[n]`` of the same floating dtype or another one.
        *rest: what the norm takes behind its weight.

    Returns:
        Tensor of the shape and dtype of ``states``, computed in the wider of both dtypes.
    """
    wider = torch.promote_types(states.dtype, weight.dtype)
    return norm(states.to(wider), weight.shape, weight, *rest).to(states.dtype)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gradients that are not final yet: fp16 does not reach down to a mean's."""
    return torch.float32 if dtype == torch.float16 else dtype


def raising_factor(largest: Tensor, exponent: int, least: int = 0) -> Tensor:
    """Return the power of two, at least ``2 ** least``, that raises ``largest`` to below ``2 ** exponent``.

    Gradients of a mean over many rows are smaller than what fp16 holds. Multiplied with this they survive
    being rounded to fp16, and dividing the fp32 results by it is exact.

    Args:
        largest: fp32 of any shape, not negative. It is not read from its device.
        exponent: at most 15 for fp16.
        least: smallest exponent of the factor, at least -126.

    Returns:
        fp32 of that shape; ``2 ** least`` where ``largest`` is larger or not finite.
    """
    # 2 ** (biased - 127) <= largest < 2 ** (biased - 126)
    biased = largest.view(torch.int32) >> 23
    return ((exponent + 253 - biased).clamp(127 + least, 127 + 60) << 23).view(torch.float32)
