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
        """Receive the layer's output ``[sequence, batch, hidden]``, from which its backward begins."""


Begin = Callable[[Any, Tensor, Sequence[Any]], Pass]
"""Function of a layer, its input and its further arguments (masks, rotary angles); returns the callbacks."""
_begins: WeakKeyDictionary[Any, list[Begin]] = WeakKeyDictionary()


def follow(layer: Any, begin: Begin) -> None:
    """Call ``begin`` at the start of each forward in pieces. It must hold no reference to the layer."""
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
    """Feature's state, with tensors, of one forward that a token dispatcher carries through its steps."""

    def leave_router(self, cut: Cut) -> None:
        """Apply ``cut`` to tensors that the experts' piece reads. Called while the dispatch is in flight."""

    def enter_experts(self) -> None:
        """Add autograd nodes before the experts' piece; their backward runs after the piece's backward."""

    def leave_experts(self, cut: Cut) -> None:
        """Apply ``cut`` to tensors that are read after the combine. Called while the combine is in flight."""


_COMPANION, _IN_PIECES = "_mindspeed_dsa_companion", "_mindspeed_dsa_in_pieces"


def accompany(dispatcher: Any, companion: Companion | None) -> None:
    """Attach a companion to a dispatcher for the current forward; ``None`` removes it."""
    setattr(dispatcher, _COMPANION, companion)


def companion_of(dispatcher: Any) -> Companion | None:
    """Return a dispatcher's companion, or ``None``."""
    companion: Companion | None = getattr(dispatcher, _COMPANION, None)
    return companion


def in_pieces(dispatcher: Any) -> bool:
    """Return whether the current call runs in pieces, so that the schedule calls the companion."""
    return getattr(dispatcher, _IN_PIECES, False)


@contextlib.contextmanager
def running_in_pieces(dispatcher: Any) -> Iterator[None]:
    """Make :func:`in_pieces` return True in the block, the piece before the experts."""
    setattr(dispatcher, _IN_PIECES, True)
    try:
        yield
    finally:
        delattr(dispatcher, _IN_PIECES)
