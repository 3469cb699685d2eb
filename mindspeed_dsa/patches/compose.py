"""From an original and its patches to the one plain function that takes its place.

No proxies: code under ``torch.compile`` runs the original behind a wrapt ``FunctionWrapper``
without a word, and proxies break ``deepcopy``, pickle and ``torch.save``. A plain function has none
of these faults and costs what a closure costs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from mindspeed_dsa.patches.errors import PatchDeclarationError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def underlying(raw: Any) -> Any:
    """The function inside a static method, class method or property; else ``raw`` itself."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    if isinstance(raw, property):
        return raw.fget
    return raw


def compose(raw: Any, replacement: Any | None, wrappers: Sequence[tuple[str, Decorator]]) -> Any:
    """Build what is to stand in the place of ``raw``, in the same kind of descriptor.

    Args:
        raw: the object as it lies in its owner's ``__dict__`` (descriptors included).
        replacement: function to use instead of the original, or ``None``.
        wrappers: ``(impl name, decorator)``, innermost first.

    Raises:
        PatchDeclarationError: a replacement or a decorator's result is no plain function.
    """
    original = underlying(raw)
    if not callable(original):
        raise PatchDeclarationError(
            f"{original!r} cannot be called, so it cannot be wrapped or replaced as a function; use kind 'value'"
        )
    current = original
    if replacement is not None:
        current = _clone(replacement, "the replacement")
    for name, decorate in wrappers:
        current = _clone(decorate(current), f"what the decorator {name} returned")
    return _in_descriptor(raw, _dress(current, original))


def _clone(function: Any, what: str) -> FunctionType:
    """A fresh function object, so that naming it never changes the implementation's own."""
    if not isinstance(function, FunctionType):
        raise PatchDeclarationError(
            f"{what} is a {type(function).__name__}, but must be a plain Python function "
            "(proxies and callable objects break torch.compile, deepcopy and pickle)"
        )
    clone = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    clone.__annotations__ = function.__annotations__
    clone.__dict__.update(function.__dict__)
    return clone


def _dress(function: FunctionType, original: Any) -> FunctionType:
    """Give ``function`` the identity that pickle, ``inspect`` and readers expect at this place."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        value = getattr(original, attribute, None)
        if value is not None:
            setattr(function, attribute, value)
    for attribute, value in getattr(original, "__dict__", {}).items():
        # torch.compile's marks belong to the original's own code object.
        if not attribute.startswith("_torchdynamo"):
            function.__dict__.setdefault(attribute, value)
    # torch.jit.script and inspect.unwrap follow __wrapped__ back to the unpatched code.
    function.__dict__.pop("__wrapped__", None)
    try:
        function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # builtins without a text signature
        pass
    return function


def _in_descriptor(raw: Any, function: FunctionType) -> Any:
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(function)
    if isinstance(raw, property):
        return type(raw)(function, raw.fset, raw.fdel, raw.__doc__)
    return function
