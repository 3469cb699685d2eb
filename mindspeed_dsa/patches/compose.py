"""Composition of an original function and its patches into one plain function.

A plain function is used instead of a proxy, because ``torch.compile`` silently runs the original of a wrapt
``FunctionWrapper``, and proxies break ``deepcopy``, pickle and ``torch.save``. The overhead is one function
call.
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
"""Code objects of all installed patches, by ``id``: codes of two files can be equal but not identical."""
_homes: set[str] = set()
"""Names of the modules that define the installed patches."""


def depends_on(part: Callable[[Any], Any]) -> Callable[[_Factory], _Factory]:
    """Mark a ``(original, context)`` decorator whose wrapper depends on only a part of the context.

    Several features may declare the decorator for one target. Features with equal parts share one wrapper.

    Args:
        part: function from a context to the part that the decorator reads, which must be hashable.
    """

    def mark(decorate: _Factory) -> _Factory:
        decorate.__dict__["_depends_on"] = part
        return decorate

    return mark


def identity(decorate: Any, context: Any) -> Any:
    """Return a key of the context; with equal keys, ``decorate`` builds the same wrapper."""
    if not _takes_context(decorate):
        return None
    part = getattr(decorate, "_depends_on", None)
    return part(context) if part is not None else id(context)


def with_context(decorate: Any, context: Any) -> Decorator:
    """Return ``decorate`` with its second argument bound to ``context``, if it takes a second argument."""
    if not _takes_context(decorate):
        plain: Decorator = decorate
        return plain
    return lambda original: decorate(original, context)


def is_patch(code: CodeType) -> bool:
    """Return whether ``code`` belongs to an installed patch: a replacement or a wrapper."""
    return _codes.get(id(code)) is code


def is_made_by_patch(function: FunctionType) -> bool:
    """Return whether a patch created this function while it ran (a nested function)."""
    # Originals in its closure are called on behalf of that patch, even after the session ended. A failed
    # backward pass, for example, leaves a graph that still holds its recomputation function.
    return "<locals>" in function.__qualname__ and function.__globals__.get("__name__") in _homes


def _takes_context(decorate: Any) -> bool:
    # Fast path for plain functions, with the same result as inspect.signature.
    if type(decorate) is FunctionType and not decorate.__dict__:
        return decorate.__code__.co_argcount - len(decorate.__defaults__ or ()) >= 2
    try:
        parameters = inspect.signature(decorate).parameters.values()
    except (TypeError, ValueError):  # no signature: the plain form
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) >= 2


def underlying(raw: Any) -> Any:
    """Return the function inside a static method, class method or property, else ``raw`` itself."""
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
    """Build the function to install in place of ``raw``, in the same kind of descriptor (e.g. staticmethod).

    Args:
        raw: object in its owner's ``__dict__``, descriptors included.
        replacement: function to use instead of the original, or ``None``.
        wrappers: ``(impl name, decorator)`` pairs, innermost first.
        place: module and qualified name of the target, if they differ from the original's (an inherited
            target). Pickle looks the patch up there.

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
        # Each layer gets the target's signature, so that a decorator can bind arguments by the target's names
        # even if another decorator is between them.
        current = _sign(clone(decorate(current), f"the result of the decorator {name}"), original)
    return _in_descriptor(raw, _dress(current, original, place))


def clone(function: Any, what: str) -> FunctionType:
    """Return a copy of the function object, whose name and attributes can be changed."""
    if type(function) is not FunctionType:
        raise PatchDeclarationError(
            f"{what} is a {type(function).__name__}, but must be a plain Python function "
            "(proxies and callable objects break torch.compile, deepcopy and pickle)"
        )
    # The copy below shares the code object, so is_patch() recognises it by its code.
    _codes[id(function.__code__)] = function.__code__
    _homes.add(function.__globals__.get("__name__", ""))
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__qualname__ = function.__qualname__  # Python 3.10 code objects have no co_qualname
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__doc__ = function.__doc__
    copy.__dict__.update(function.__dict__)
    return copy


def put_at(function: FunctionType, module: str, qualname: str) -> FunctionType:
    """Set a function's module and names to the place where pickle will look for it."""
    function.__module__ = module
    function.__qualname__ = qualname
    function.__name__ = qualname.rpartition(".")[2]
    return function


def _dress(function: FunctionType, original: Any, place: tuple[str, str] | None) -> FunctionType:
    """Copy the original's names, docstring and attributes to ``function``, for pickle and ``inspect``."""
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
    """Give ``function`` the signature of ``original``."""
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
    """Yield the wrappers and closures inside a composed patch that refer to ``original``."""
    # These are the descriptor, the decorators' functions and their closures, and the containers and
    # instances of the implementation's own classes in those closures. Module-level functions are no part of
    # the patch.
    outermost = underlying(composed)
    # Modules that define the decorators. Instances of their classes belong to the patch.
    homes = set()
    seen = {id(original)}
    stack: list[Any] = [composed, outermost]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if is_a(item, FunctionType):
            # functools.wraps gives a decorator's function the original's name, so also compare its code.
            is_part = item is outermost or "<locals>" in item.__qualname__ or is_patch(item.__code__)
            if not is_part:
                continue
            homes.add(item.__globals__.get("__name__"))
            stack += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        elif is_a(item, CellType):
            try:
                stack.append(item.cell_contents)
            except ValueError:  # not filled yet
                continue
        elif is_a(item, (tuple, list)):
            stack += item
        elif is_a(item, dict):
            stack += item.values()
        elif type(item).__module__ in homes and hasattr(item, "__dict__"):
            stack.append(vars(item))
        elif not is_a(item, _DESCRIPTORS):
            continue
        yield item
