"""Computing in the precision that the operators document, whatever surrounds them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context without ``torch.autocast``, which would round the fp32 products inside to 16 bits."""
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
