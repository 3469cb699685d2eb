"""Composes an original and its patches into the one plain function that replaces it.

No proxies: under ``torch.compile`` a wrapt ``FunctionWrapper`` silently runs the original, and proxies break
``deepcopy``, pickle and ``torch.save``. A plain function has none of these problems and the overhead of a
closure.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from mindspeed_dsa.patches.errors import PatchDeclarationError
from mindspeed_dsa.patches.signatures import is_a

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_Factory = TypeVar("_Factory", bound=Callable[..., Any])
_METHODS = (staticmethod, classmethod)
_DESCRIPTORS = (*_METHODS, property)
_codes: WeakValueDictionary[int, CodeType] = WeakValueDictionary()
"""Of all functions that were ever put in place of another, by identity: codes of two files can be equal."""
_homes: set[str] = set()
"""Modules that they were defined in."""


def depends_on(part: Callable[[Any], Any]) -> Callable[[_Factory], _Factory]:
    """Mark a ``(original, context)`` decorator that reads only a part of its context.

    Features that claim it on one target get it once where their parts are equal.

    Args:
        part: what the decorator reads of a context; hashable.
    """

    def mark(decorate: _Factory) -> _Factory:
        decorate.__dict__["_depends_on"] = part
        return decorate

    return mark


def identity(decorate: Any, context: Any) -> Any:
    """Return the part of the context that enters a decorator, which tells one use of it from another."""
    if not _takes_context(decorate):
        return None
    part = getattr(decorate, "_depends_on", None)
    return part(context) if part is not None else id(context)


def with_context(decorate: Any, context: Any) -> Decorator:
    """A ``wrap`` decorator of one argument, which is the decorator itself if it takes no context."""
    if not _takes_context(decorate):
        plain: Decorator = decorate
        return plain
    return lambda original: decorate(original, context)


def is_patch(code: CodeType) -> bool:
    """Return whether a function of this code was put in place of another package's, or around it."""
    return _codes.get(id(code)) is code


def is_made_by_patch(function: FunctionType) -> bool:
    """Return whether a module that holds a patch's functions has made this one, in a call of one of them.

    What it has of an original it calls for that patch, whose session may be over: a graph that a failed
    backward has left behind, for example, holds the function that would have computed something again.
    """
    return "<locals>" in function.__qualname__ and function.__globals__.get("__name__") in _homes


def _takes_context(decorate: Any) -> bool:
    if type(decorate) is FunctionType and not decorate.__dict__:  # what inspect would say, at once
        return decorate.__code__.co_argcount - len(decorate.__defaults__ or ()) >= 2
    try:
        parameters = inspect.signature(decorate).parameters.values()
    except (TypeError, ValueError):  # no signature: the plain form
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) >= 2


def underlying(raw: Any) -> Any:
    """The function inside a static method, class method or property; else ``raw`` itself."""
    if is_a(raw, _METHODS):
        return raw.__func__
    if is_a(raw, property):
        return raw.fget
    return raw


def compose(
    raw: Any,
    replacement: Any | None,
    wrappers: Sequence[tuple[str, Decorator]],
    place: tuple[str, str] | None = None,
) -> Any:
    """Build the replacement of ``raw``, in the same kind of descriptor.

    Args:
        raw: the object in its owner's ``__dict__`` (descriptors included).
        replacement: function to use instead of the original, or ``None``.
        wrappers: ``(impl name, decorator)``, innermost first.
        place: module and qualified name of the target if they differ from the original's (an inherited
        target): pickle must find the patch there.

    Raises:
        PatchDeclarationError: the target is not a function, or a replacement or a decorator's result is not a
        plain function.
    """
    original = underlying(raw)
    if is_a(original, type):
        raise PatchDeclarationError(
            f"{original!r} is a class, and replacing it by a function breaks isinstance and subclasses; "
            "patch its methods, or use kind 'value' with a class"
        )
    if not callable(original):
        raise PatchDeclarationError(
            f"{original!r} cannot be called, so no function can wrap or replace it; use kind 'value'"
        )
    if isinstance(raw, _DESCRIPTORS) and not is_a(raw, _DESCRIPTORS):
        raise PatchDeclarationError(
            f"other code put a {type(raw).__module__}.{type(raw).__qualname__} around a "
            f"{raw.__class__.__name__} there, which no function can replace; "
            "import mindspeed_dsa before that code"
        )
    current = original
    if replacement is not None:
        current = _sign(clone(replacement, "the replacement"), original)
    for name, decorate in wrappers:
        # A decorator that binds arguments by the target's names finds them whatever is between it and the
        # target.
        current = _sign(clone(decorate(current), f"the result of the decorator {name}"), original)
    return _in_descriptor(raw, _dress(current, original, place))


def clone(function: Any, what: str) -> FunctionType:
    """Copy the function object, so that renaming it never changes the implementation's own."""
    if type(function) is not FunctionType:
        raise PatchDeclarationError(
            f"{what} is a {type(function).__name__}, but must be a plain Python function "
            "(proxies and callable objects break torch.compile, deepcopy and pickle)"
        )
    _codes[id(function.__code__)] = function.__code__
    _homes.add(function.__globals__.get("__name__", ""))
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__qualname__ = function.__qualname__  # before Python 3.11 code does not know it
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__doc__ = function.__doc__
    copy.__dict__.update(function.__dict__)
    return copy


def put_at(function: FunctionType, module: str, qualname: str) -> FunctionType:
    """Name a function after a place, where pickle will look for it."""
    function.__module__ = module
    function.__qualname__ = qualname
    function.__name__ = qualname.rpartition(".")[2]
    return function


def _dress(function: FunctionType, original: Any, place: tuple[str, str] | None) -> FunctionType:
    """Give ``function`` the identity that pickle, ``inspect`` and readers expect at this place."""
    for attribute in ("__module__", "__name__", "__qualname__"):
        value = getattr(original, attribute, None)
        if value is not None:
            setattr(function, attribute, value)
    function.__doc__ = getattr(original, "__doc__", None)
    if place is not None:
        put_at(function, *place)
    for attribute, value in getattr(original, "__dict__", {}).items():
        # Attributes set by torch.compile belong to the original's own code; one of them (_torchdynamo_inline)
        # would make compiled callers run the original.
        if not attribute.startswith("_torchdynamo"):
            function.__dict__.setdefault(attribute, value)
    # torch.jit.script and inspect.unwrap follow __wrapped__ back to the unpatched code.
    function.__dict__.pop("__wrapped__", None)
    return function


def _sign(function: FunctionType, original: Any) -> FunctionType:
    """Give ``function`` the signature of ``original``, which it takes the place of."""
    with contextlib.suppress(TypeError, ValueError):  # builtins without a text signature
        function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return function


def _in_descriptor(raw: Any, function: FunctionType) -> Any:
    if is_a(raw, _METHODS):
        return type(raw)(function)
    if is_a(raw, property):
        return type(raw)(function, raw.fset, raw.fdel, raw.__doc__)
    return function


def parts(composed: Any, original: Any) -> Iterator[Any]:
    """Everything through which a composed object holds ``original``, excluding the original itself.

    The descriptor, the closures of the decorators' functions, and in those closures containers and
    instances of the implementation's own classes. Functions that a module owns are not traversed: they are
    not part of the patch.
    """
    outermost = underlying(composed)
    homes = set()
    seen = {id(original)}
    stack: list[Any] = [composed, outermost]
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if is_a(thing, FunctionType):
            # A decorator may have given its function the original's name, as functools.wraps does.
            own = thing is outermost or "<locals>" in thing.__qualname__ or is_patch(thing.__code__)
            if not own:
                continue
            homes.add(thing.__globals__.get("__name__"))
            stack += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
        elif is_a(thing, CellType):
            try:
                stack.append(thing.cell_contents)
            except ValueError:  # not filled yet
                continue
        elif is_a(thing, (tuple, list)):
            stack += thing
        elif is_a(thing, dict):
            stack += thing.values()
        elif type(thing).__module__ in homes and hasattr(thing, "__dict__"):
            stack.append(vars(thing))
        elif not is_a(thing, _DESCRIPTORS):
            continue
        yield thing
