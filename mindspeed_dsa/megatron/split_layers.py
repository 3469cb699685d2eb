"""Callbacks for features when a schedule runs a transformer layer's forward in pieces.

A piece is a part of a layer's forward between two points where the schedule switches to another microbatch:
for example attention and router, or the experts. A schedule that runs layers in pieces does not call
``TransformerLayer.forward``, so a feature that decorates it registers its callbacks here instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor


class Pass:
    """Callbacks of one feature for one forward of a layer that runs in pieces."""

    def piece(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that the schedule enters around each piece."""
        return contextlib.nullcontext()

    def ends(self, output: Tensor) -> None:
        """Called at the end of the layer's forward with its output, ``[sequence, batch, hidden]``.

        The layer's backward begins at this tensor.
        """


Begin = Callable[[Any, Tensor, Sequence[Any]], Pass]
"""Function of a layer, its input and its further arguments (masks, rotary angles); returns the callbacks."""
_begins: WeakKeyDictionary[Any, list[Begin]] = WeakKeyDictionary()


def follow(layer: Any, begin: Begin) -> None:
    """Register ``begin``, called when a forward in pieces starts. It must hold no reference to the layer."""
    _begins.setdefault(layer, []).append(begin)


class Passes(Pass):
    """Callbacks of all features for one forward of a layer that runs in pieces."""

    def __init__(self, layer: Any, hidden: Tensor, others: Sequence[Any]) -> None:
        self._passes = [begin(layer, hidden, others) for begin in _begins.get(layer, ())]

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Enter the contexts of all features around a piece."""
        with contextlib.ExitStack() as stack:
            for feature_pass in self._passes:
                stack.enter_context(feature_pass.piece())
            yield

    def ends(self, output: Tensor) -> None:
        """Pass the layer's output to all features."""
        for feature_pass in self._passes:
            feature_pass.ends(output)


def transformer_layer(layer: Any) -> Any:
    """Return the layer itself, or the transformer layer inside a multi-token prediction layer."""
    for name in ("transformer_layer", "mtp_model_layer"):
        if hasattr(layer, name):
            return getattr(layer, name)
    return layer


# -- tensors that pass between the pieces of a MoE layer in addition to its tokens --------------------

Cut = Callable[[Tensor], Tensor]
"""Function that detaches a tensor at a piece's border, and returns the leaf tensor for the next piece."""


class Companion:
    """A feature's tensors for one forward of a MoE layer, stored on the layer's token dispatcher.

    The schedule calls the methods below at the borders between pieces.
    """

    def leave_router(self, cut: Cut) -> None:
        """Detach, with ``cut``, this object's tensors that the experts' piece reads.

        Called after the router's piece, while the dispatch is in flight.
        """

    def enter_experts(self) -> None:
        """Add autograd nodes in front of the experts' piece, so that they run at the end of its backward."""

    def leave_experts(self, cut: Cut) -> None:
        """Detach, with ``cut``, this object's tensors that are read after the combine.

        Called after the experts' piece, while the combine is in flight.
        """


_COMPANION, _IN_PIECES = "_mindspeed_dsa_companion", "_mindspeed_dsa_in_pieces"


def accompany(dispatcher: Any, companion: Companion | None) -> None:
    """Store a companion on a token dispatcher for the current forward; ``None`` removes the stored one."""
    setattr(dispatcher, _COMPANION, companion)


def companion_of(dispatcher: Any) -> Companion | None:
    """Return the companion stored on a token dispatcher, or ``None``."""
    companion: Companion | None = getattr(dispatcher, _COMPANION, None)
    return companion


def in_pieces(dispatcher: Any) -> bool:
    """Return whether the layer's current forward runs in pieces. Only then is the companion called."""
    return getattr(dispatcher, _IN_PIECES, False)


@contextlib.contextmanager
def running_in_pieces(dispatcher: Any) -> Iterator[None]:
    """Make :func:`in_pieces` return True inside the block, which runs the piece before the experts."""
    setattr(dispatcher, _IN_PIECES, True)
    try:
        yield
    finally:
        delattr(dispatcher, _IN_PIECES)
