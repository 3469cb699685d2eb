"""Transformer layers whose forward a schedule splits into pieces, for features that work in that forward.

Such a feature decorates ``TransformerLayer.forward``, which a schedule that takes layers apart does not call.
For each layer that it works in it says here what it does around a forward, and the schedule does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
