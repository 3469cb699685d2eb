"""Calls of code that torch.compile has made, without what lies around its guards.

A call of a compiled function passes a wrapper and the frame evaluator before torch's guards are asked whether
code that is there serves the arguments, and on the host that takes longer than the guards. Here they are
asked first. They are torch's own, all of them, and where they do not hold, or torch is in a state that the
wrapper looks at, the caller goes the whole way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._dynamo import eval_frame


class Direct:
    """The compiled forms of one function, which nobody else compiles.

    Attributes:
        function: what is to be given to ``torch.compile``: the same function with a code object of its own,
            to which torch attaches the compiled forms.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = _with_code(function, function.__code__.replace())
        self._code = self.function.__code__
        self._names = self._code.co_varnames[: self._code.co_argcount]
        self._forms: dict[int, FunctionType] = {}

    def form(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """The compiled form whose guards hold for the arguments; ``None`` if none does, or none may run."""
        if eval_frame._stance.stance != "default" or torch._C._get_tracing_state() is not None:
            return None
        given = dict(zip(self._names, args, strict=True))
        # Asked for anew every time: torch removes a form when something dies that its guards know.
        for entry in eval_frame._debug_get_cache_entry_list(self._code):
            if entry.guard_manager.check(given):
                return self._function(entry.code)
        return None

    def _function(self, code: CodeType) -> FunctionType:
        known = self._forms.get(id(code))
        if known is None or known.__code__ is not code:
            known = self._forms[id(code)] = _with_code(self.function, code)
        return known


def _with_code(function: Callable[..., Any], code: CodeType) -> FunctionType:
    """A function that differs in its code alone."""
    assert isinstance(function, FunctionType)
    made = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__module__ = function.__module__
    return made
