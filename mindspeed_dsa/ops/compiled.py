"""Exclusion of operators from ``torch.compile`` graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Decorate a function to run eagerly, with a graph break before and after each call.

    Backends read tensor contents on the host and call NumPy and custom kernels, which cannot be traced.
    ``torch._dynamo`` is imported only if something is compiled.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        # A list instead of functools.cache: Dynamo traces this too, and looks through cached functions.
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return cast(Function, run)
