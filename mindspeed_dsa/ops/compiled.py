"""Operators in code that ``torch.compile`` compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Run a function as it is, between two compiled graphs.

    Backends choose by what they read of tensors, and call NumPy and kernels of their own, none of which a
    graph holds; tracing them fails. Where nothing compiles, the compiler is not imported.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:  # the compiler traces this too, and looks through what functools remembers
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return cast(Function, run)
