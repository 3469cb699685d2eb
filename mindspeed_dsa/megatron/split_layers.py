"""Transformer layers whose forward a schedule splits into pieces, for features that work in that forward.

Such a feature decorates ``TransformerLayer.forward``, which a schedule that takes layers apart does not call.
For each layer that it works in it says here what it does around a forward, and the schedule does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor


class Pass:
    """Forward of a layer in pieces, as one feature follows it."""

    def piece(self) -> contextlib.AbstractContextManager[None]:
        """Surround a piece."""
        return contextlib.nullcontext()

    def ends(self, output: Tensor) -> None:
        """Take the layer's output, ``[sequence, batch, hidden]``, from which its backward begins."""


Begin = Callable[[Any, Tensor, Sequence[Any]], Pass]
"""Gets a layer, its input and whatever else it is given: masks, rotary angles."""
_begins: WeakKeyDictionary[Any, list[Begin]] = WeakKeyDictionary()


def follow(layer: Any, begin: Begin) -> None:
    """Have ``begin`` called for each forward of this layer in pieces; it must not refer to the layer."""
    _begins.setdefault(layer, []).append(begin)


class Passes(Pass):
    """Forward of a layer in pieces, as all features follow it."""

    def __init__(self, layer: Any, hidden: Tensor, others: Sequence[Any]) -> None:
        self._passes = [begin(layer, hidden, others) for begin in _begins.get(layer, ())]

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Surround a piece."""
        with contextlib.ExitStack() as stack:
            for each in self._passes:
                stack.enter_context(each.piece())
            yield

    def ends(self, output: Tensor) -> None:
        """Give the layer's output to all features."""
        for each in self._passes:
            each.ends(output)


def transformer_layer(layer: Any) -> Any:
    """Return the layer itself, or the one in a layer of multi-token prediction."""
    for name in ("transformer_layer", "mtp_model_layer"):
        if hasattr(layer, name):
            return getattr(layer, name)
    return layer


# -- what passes between the pieces of a MoE layer beside its rows ------------------------------------

Cut = Callable[[Tensor], Tensor]
"""Ends a tensor's graph at the border of a piece, and returns what stands for it behind that."""


class Companion:
    """State of one forward that a feature carries through a dispatcher's steps, tensors included."""

    def leave_router(self, cut: Cut) -> None:
        """Cut what the experts' piece reads; the dispatch is on its way."""

    def enter_experts(self) -> None:
        """Stand before all that the experts' piece computes, and in its backward behind it."""

    def leave_experts(self, cut: Cut) -> None:
        """Cut what is read behind the combine, which is on its way."""


_COMPANION = "_mindspeed_dsa_companion"
_in_pieces: ContextVar[bool] = ContextVar("layer in pieces", default=False)


def accompany(dispatcher: Any, companion: Companion | None) -> None:
    """Have a dispatcher, which serves one forward at a time, carry a companion through its steps, or none."""
    setattr(dispatcher, _COMPANION, companion)


def companion_of(dispatcher: Any) -> Companion | None:
    """Return what a dispatcher carries."""
    companion: Companion | None = getattr(dispatcher, _COMPANION, None)
    return companion


def in_pieces() -> bool:
    """Return whether a schedule runs the layer in pieces, and calls its companion."""
    return _in_pieces.get()


@contextlib.contextmanager
def running_in_pieces() -> Iterator[None]:
    """Surround the piece before the experts."""
    token = _in_pieces.set(True)
    try:
        yield
    finally:
        _in_pieces.reset(token)
