"""A selection of keys on its way from the layer that computes it to those that share it.

Layers run in order within one forward of a chunk, and a sharing layer attends to what the nearest computing
layer below it has selected. So there is one selection at a time: a computing layer stores it, and the last
layer that reads it lets go of it.

Recomputation breaks the order: a sharing layer runs again in backward, before the layer that it shares with,
and while other microbatches are in flight. So a checkpointed function takes along what lay there when it
first ran, if one of its layers has read it, and gives it up when it runs again: autograd keeps the function
as long as the graph, which is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mindspeed_dsa.megatron import replayed_selections
from mindspeed_dsa.megatron.replayed_selections import Microbatch

ATTRIBUTE = "_mindspeed_dsa_place"
"""Name under which a ``DSAttention`` has its :class:`Place`."""


@dataclass(frozen=True)
class Place:
    """Part of one layer in sharing.

    Attributes:
        name: of the layer, for messages and as the key of its selection.
        source: name of the layer whose selection it attends to; its own if it computes.
        hands_on: layers above it attend to its selection.
        is_last: no layer above it attends to the same selection.
        repeats: the layer runs several times in one forward, and selects the first time only.
    """

    name: str
    source: str
    hands_on: bool = False
    is_last: bool = True
    repeats: bool = False

    @property
    def computes(self) -> bool:
        """Return whether the layer has an indexer."""
        return self.name == self.source


def place_of(attention: Any) -> Place | None:
    """Return the place of a ``DSAttention``; None in a model without sharing."""
    place: Place | None = vars(attention).get(ATTRIBUTE)
    return place


@dataclass
class Selected:
    """Keys that one layer has selected in one forward.

    Attributes:
        source: name of the layer.
        topk_indices: ``[batch, rows, topk]`` int, -1 where there is no key; one for each run of rows that the
            operators were called with; None where rows attend to all keys that they see.
        lengths: ``[batch, rows]``, leading entries that count, if Megatron's kernels say so.
        reads: how often layers have read it.
    """

    source: str
    topk_indices: tuple[Tensor | None, ...]
    lengths: Tensor | None = None
    reads: int = 0


class Selections:
    """Holder of the latest selection, in a forward or in one recomputation.

    Args:
        latest: what lies there at the beginning.
    """

    def __init__(self, latest: Selected | None = None) -> None:
        self.latest = latest

    def store(self, place: Place, *topk_indices: Tensor | None) -> None:
        """Keep a layer's selection for the layers above, if one of them reads it."""
        if place.hands_on:
            self.latest = Selected(place.source, topk_indices)

    def read(self, place: Place) -> Selected:
        """Return the selection that a sharing layer attends to.

        Raises:
            RuntimeError: it is not there.
        """
        latest = self.latest
        if latest is None or latest.source != place.source:
            raise RuntimeError(
                f"dsa-shared-selections: {place.name} attends to the keys that {place.source} selects, which "
                f"has not run before it; {'nothing' if latest is None else latest.source} has. A pipeline "
                "chunk must begin with a layer that selects, and layers may be recomputed by Megatron's "
                "tensor_parallel.checkpoint or --moe-fb-overlap only"
            )
        latest.reads += 1
        return latest

    def release(self, place: Place) -> None:
        """Let go of the selection after its last reader."""
        if place.is_last:
            self.latest = None

    def is_shared_by(self, place: Place) -> bool:
        """Return whether a layer attends to a selection that is there, instead of computing one."""
        if place.repeats:
            return self.latest is not None and self.latest.source == place.source
        return not place.computes


_current: ContextVar[Selections | None] = ContextVar("_current", default=None)


def current() -> Selections:
    """Return the holder of this thread, or of the recomputation that it is in."""
    holder = _current.get()
    if holder is None:
        holder = Selections()
        _current.set(holder)
    return holder


@contextmanager
def recomputing(latest: Selected | None) -> Iterator[None]:
    """Let layers find a selection of an earlier forward, and leave the running one's alone."""
    token = _current.set(Selections(latest))
    try:
        yield
    finally:
        _current.reset(token)


class Carrying:
    """Function that backward runs again, with the selection that its layers read.

    Args:
        function: called once in forward, and once more in backward, where it finds the same selection.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._has_run, self._is_spent = function, False, False
        self._read: Selected | None = None
        self._microbatch: Microbatch | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        Raises:
            RuntimeError: its layers share or replay a selection, and it has been recomputed before.
        """
        if self._is_spent:
            raise RuntimeError(
                "dsa-shared-selections: layers that share or replay a selection were recomputed twice, and "
                "the selection is freed after the first time; omit retain_graph in backward, or do not "
                "recompute them"
            )
        if self._has_run:
            replays = self._microbatch is not None and self._microbatch.source is not None
            self._is_spent = replays or self._read is not None
            with ExitStack() as stack:
                stack.enter_context(recomputing(self._read))
                stack.enter_context(replayed_selections.recomputing(self._microbatch))
                self._read = self._microbatch = None
                return self._function(*args, **kwargs)
        self._has_run = True
        self._microbatch = replayed_selections.current()
        latest = current().latest
        reads = 0 if latest is None else latest.reads
        result = self._function(*args, **kwargs)
        if latest is not None and latest.reads > reads:
            self._read = latest
        return result
