"""Names of collectives: what they carry, for which layer, in which forward or backward.

Code that starts a collective says what it is for, ``with named("dispatch"):``. Features that know the layer
or the place in the schedule add theirs. Who records collectives reads :func:`current`; nobody else does, so a
name costs no more than setting a context variable.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Pass:
    """One forward or backward of a chunk of the model.

    Attributes:
        direction: ``forward`` or ``backward``.
        microbatch: its number in the step.
        chunk: of the model, as the rank numbers its own.
    """

    direction: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return f"microbatch {self.microbatch}{chunk}, {self.direction}"


@dataclass(frozen=True)
class Name:
    """Purpose and place of a collective, as far as they are known.

    Attributes:
        what: is sent.
        layer: as Megatron numbers them, from 1.
        passes: that run; two where a pair shares a block.
        reverse: whether it is the transfer of gradients that belongs to one of forward.
        half: of the microbatch's tokens, 0 or 1, where they are cut.
    """

    what: str = ""
    layer: int | None = None
    passes: tuple[Pass, ...] = ()
    reverse: bool = False
    half: int | None = None

    def reversed(self) -> Name:
        """Return the name of the transfer of its gradients."""
        forwards = [each for each in self.passes if each.direction == "forward"]
        backwards = tuple(replace(each, direction="backward") for each in forwards)
        return replace(self, passes=backwards or self.passes, reverse=True)

    def __str__(self) -> str:
        """Return it in words, such as ``dispatch of layer 3, microbatch 5, forward``; empty if unknown."""
        subject = f"gradient of {self.what}" if self.what and self.reverse else self.what
        layer = "" if self.layer is None else f"layer {self.layer}"
        first = " of ".join(filter(None, (subject, layer)))
        half = "" if self.half is None else f"half {self.half}"
        place = " of ".join(filter(None, (half, " beside ".join(map(str, self.passes)))))
        return ", ".join(filter(None, (first, place)))


_NOTHING = Name()
_name: ContextVar[Name] = ContextVar("name of collectives", default=_NOTHING)


def current() -> Name:
    """Return the name of collectives that start now."""
    return _name.get()


def set_current(name: Name) -> None:
    """Name what this thread starts from now on, for callers that no block of code encloses."""
    _name.set(name)


class named:
    """Context whose collectives carry something.

    Args:
        what: they carry, in a few words.
        layer: that they belong to, where the caller knows; otherwise the one that is known already.
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
    """Return a context whose collectives are of one half of the tokens, 0 or 1."""
    return under(replace(_name.get(), half=number))


class under:
    """Context whose collectives have a name that was taken before.

    Args:
        name: taken with :func:`current`.
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
