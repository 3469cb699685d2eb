"""Callable inspection: actual type, parameters, and call compatibility of a replacement."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from types import FunctionType
from typing import Any

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def is_a(thing: Any, types: type | tuple[type, ...]) -> bool:
    """Return ``issubclass(type(thing), types)``; unlike isinstance, not misled by ``__class__``."""
    # isinstance also reads the object's __class__. A wrapt proxy of a function, or a mock, would then count
    # as a function, and a lazy object would be loaded.
    return issubclass(type(thing), types)


def parameters(function: Any) -> list[Parameter] | None:
    """Return a callable's parameters, or ``None`` if they are unknown (many builtins)."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def missing(function: Any, names: set[str]) -> list[str]:
    """Return the ``names`` that ``function`` does not take, sorted."""
    # Fast path for plain functions, with the same result as inspect.signature.
    if is_a(function, FunctionType) and not function.__dict__:
        code = function.__code__
        if code.co_flags & inspect.CO_VARKEYWORDS:
            return []
        return sorted(names.difference(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]))
    accepted = parameters(function)
    if accepted is None or any(parameter.kind is Parameter.VAR_KEYWORD for parameter in accepted):
        return []
    return sorted(names - {parameter.name for parameter in accepted})


def misfits(original: Callable[..., Any], replacement: Callable[..., Any], method: bool) -> list[str]:
    """Describe the calls of ``original`` that would fail with ``replacement``; empty if none.

    Args:
        original: function that callers expect.
        replacement: function that they will call instead.
        method: whether the first parameter is the instance or class, which callers never pass by name.
    """
    old, new = parameters(original), parameters(replacement)
    if old is None or new is None:
        return []
    if method:
        # Python passes the instance or class by position, whatever the parameter is called.
        old, new = old[1:], _without_first(new)
    return [*_not_accepted(old, new), *_newly_demanded(old, new)]


def _without_first(parameters: list[Parameter]) -> list[Parameter]:
    return parameters[1:] if parameters and parameters[0].kind in _POSITIONAL else parameters


def _not_accepted(old: list[Parameter], new: list[Parameter]) -> list[str]:
    problems = []
    kinds = {parameter.kind for parameter in new}
    by_name = {parameter.name for parameter in new if parameter.kind in _BY_NAME}
    in_order = [parameter.name for parameter in new if parameter.kind in _POSITIONAL]
    position = 0
    for parameter in old:
        if (
            parameter.kind in _BY_NAME
            and Parameter.VAR_KEYWORD not in kinds
            and parameter.name not in by_name
        ):
            problems.append(f"it does not take the parameter {parameter.name}")
        elif parameter.kind in _POSITIONAL and position < len(in_order):
            if parameter.kind is not Parameter.POSITIONAL_ONLY and in_order[position] != parameter.name:
                problems.append(f"it takes {in_order[position]} where {parameter.name} is passed by position")
        elif parameter.kind in _POSITIONAL and Parameter.VAR_POSITIONAL not in kinds:
            problems.append(f"it does not take {parameter.name} by position")
        position += parameter.kind in _POSITIONAL
    return problems


def _newly_demanded(old: list[Parameter], new: list[Parameter]) -> list[str]:
    required = {parameter.name for parameter in old if parameter.default is Parameter.empty}
    positional_only = sum(parameter.kind is Parameter.POSITIONAL_ONLY for parameter in old)
    if {parameter.kind for parameter in old} & set(_VARIADIC):
        return []  # the original takes *args or **kwargs, so its callers' arguments are unknown
    return [
        f"it requires {parameter.name}, which callers need not pass"
        for parameter in new[positional_only:]
        if parameter.kind not in _VARIADIC
        and parameter.default is Parameter.empty
        and parameter.name not in required
    ]
