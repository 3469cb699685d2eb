"""Dtypes of the operators' sums and gradients, and protection from ``torch.autocast``."""

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
    """Return a context without ``torch.autocast``, which would round fp32 products to 16 bits."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def outside_autocast(function: Function) -> Function:
    """Decorate a function to run without autocast on the device of its first tensor argument.

    Autocast would round fp32 products to 16 bits. Its state is per thread, so results would also depend on
    the number of worker threads.
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
    """Return the dtype of sums over all tokens: fp64, or fp32 on NPUs, whose vector units lack fp64."""
    return torch.float32 if npu_device.takes_device(device.type) else torch.float64


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products and sums: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def normalize(norm: Callable[..., Tensor], states: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Apply one of torch's norms to an input and a weight of possibly different dtypes.

    With mixed dtypes, torch's kernels are slow or raise, and the result's dtype varies. Input and weight are
    converted to the wider dtype first.

    Args:
        norm: ``F.rms_norm`` or ``F.layer_norm``.
        states: ``[..., n]``.
        weight: ``[n]`` in any floating dtype.
        *rest: arguments of the norm after its weight.

    Returns:
        Tensor of the shape and dtype of ``states``, computed in the wider of both dtypes.
    """
    wider = torch.promote_types(states.dtype, weight.dtype)
    return norm(states.to(wider), weight.shape, weight, *rest).to(states.dtype)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of intermediate gradients: fp32 for fp16, where the gradient of a mean underflows."""
    return torch.float32 if dtype == torch.float16 else dtype


def raising_factor(largest: Tensor, exponent: int, least: int = 0) -> Tensor:
    """Return the largest power of two that scales ``largest`` to below ``2 ** exponent``.

    It is at least ``2 ** least``. Gradients of a mean over many tokens underflow in fp16. Multiplied by this
    factor they survive rounding to fp16, and dividing the fp32 results by it is exact.

    Args:
        largest: non-negative fp32 tensor of any shape. It is not copied to the host.
        exponent: exponent of the bound, at most 15 for fp16.
        least: smallest exponent of the factor, at least -126.

    Returns:
        fp32 tensor with the shape of ``largest``; ``2 ** least`` where ``largest`` is too large or not
        finite.
    """
    # The exponent bits say 2 ** (biased - 127) <= largest < 2 ** (biased - 126). The factor's exponent is
    # then exponent - (biased - 126), and 127 more in biased form. It is at most 60, so that zero gives a
    # finite factor.
    biased = largest.view(torch.int32) >> 23
    return ((exponent + 253 - biased).clamp(127 + least, 127 + 60) << 23).view(torch.float32)
