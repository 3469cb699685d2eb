"""Names of collectives for debugging: the content, the layer, and the forward or backward they belong to.

Code that starts a collective names its content, ``with named("dispatch"):``. Features that know the layer or
the microbatch add them. Only the recorder of collectives reads :func:`current`, so a name only costs setting
a context variable.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Pass:
    """One forward or backward of a model chunk.

    Attributes:
        direction: ``forward`` or ``backward``.
        microbatch: index of the microbatch in the step.
        chunk: index of the chunk on this rank.
    """

    direction: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return f"microbatch {self.microbatch}{chunk}, {self.direction}"


@dataclass(frozen=True)
class Name:
    """Description of a collective; unknown fields are left empty.

    Attributes:
        what: content that is sent, for example ``dispatch``.
        layer: Megatron's layer number, from 1.
        passes: forwards and backwards that are running; two if they run as a pair.
        reverse: whether this transfer returns the gradients of a transfer in forward.
        half: index of the half of the microbatch's tokens, 0 or 1, if the tokens are split in two halves.
    """

    what: str = ""
    layer: int | None = None
    passes: tuple[Pass, ...] = ()
    reverse: bool = False
    half: int | None = None

    def reversed(self) -> Name:
        """Return the name of the reverse transfer, which returns the gradients."""
        # In a pair, the transfer belongs to the forward; its gradients return in that forward's backward.
        forwards = [run for run in self.passes if run.direction == "forward"]
        backwards = tuple(replace(run, direction="backward") for run in forwards)
        return replace(self, passes=backwards or self.passes, reverse=True)

    def __str__(self) -> str:
        """Return the name in words, for example ``dispatch of layer 3, microbatch 5, forward``, or ``""``."""
        subject = f"gradient of {self.what}" if self.what and self.reverse else self.what
        layer = "" if self.layer is None else f"layer {self.layer}"
        first = " of ".join(filter(None, (subject, layer)))
        half = "" if self.half is None else f"half {self.half}"
        place = " of ".join(filter(None, (half, " beside ".join(map(str, self.passes)))))
        return ", ".join(filter(None, (first, place)))


_NOTHING = Name()
_name: ContextVar[Name] = ContextVar("name of collectives", default=_NOTHING)


def current() -> Name:
    """Return the name of collectives started now."""
    return _name.get()


def set_current(name: Name) -> None:
    """Set the name of this thread's collectives from now on, for callers that cannot use a ``with`` block."""
    _name.set(name)


class named:
    """Context manager that names the content of the collectives started inside.

    Args:
        what: content, in a few words.
        layer: layer number; default: the layer set by an enclosing context.
    """

    __slots__ = ("_layer", "_token", "_what")

    def __init__(self, what: str, layer: int | None = None) -> None:
        self._what, self._layer = what, layer

    def __enter__(self) -> None:
        name = _name.get()
        layer = name.layer if self._layer is None else self._layer
        self._token = _name.set(Name(self._what, layer, name.passes, name.reverse, name.half))

    def __exit__(self, *_: Any) -> None:
        _name.reset(self._token)


def of_half(number: int) -> under:
    """Return a context manager for collectives of one half of the tokens, 0 or 1."""
    return under(replace(_name.get(), half=number))


class under:
    """Context manager that restores an earlier name for the collectives started inside.

    Args:
        name: result of an earlier :func:`current`.
    """

    __slots__ = ("_name", "_token")

    def __init__(self, name: Name) -> None:
        self._name = name
        self._token: Token[Name] | None = None

    def __enter__(self) -> None:
        self._token = _name.set(self._name)

    def __exit__(self, *_: Any) -> None:
        assert self._token is not None
        _name.reset(self._token)
