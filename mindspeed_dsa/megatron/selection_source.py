"""Selections of keys on their way to and from the layers of a forward.

A core attention asks the sources of its layer, :func:`sources_of`, for keys, attends to those of the first
one that has some, else to the indexer's, and tells all of them which it took. The sources are

* of a layer that shares: the selection of the nearest computing layer below. Layers run in order within one
  forward of a chunk, so there is one selection at a time: a computing layer stores it, and the last layer
  that reads it lets go of it;
* those of the :class:`Microbatch` that whoever follows the schedule sets before each forward.

Recomputation breaks the order: a sharing layer runs again in backward, before the layer that it shares with,
and while other microbatches are in flight. So a checkpointed function takes along its microbatch and the
selection that one of its layers has read (:class:`Carrying`). It gives them up when it runs again: autograd
keeps the function as long as the graph, which is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUMBER = "_mindspeed_dsa_layer_number"
"""Name under which a ``DSAttention`` has its layer's number, from 1; multi-token prediction counts on."""
PLACE = "_mindspeed_dsa_place"
"""Name under which a ``DSAttention`` has its :class:`Place`."""


# -- the seam ------------------------------------------------------------------------------------


class RowRun(NamedTuple):
    """Neighbours in a sequence among the rows of a rank.

    Attributes:
        first: the first row on this rank.
        end: one past the last.
        low: position of the first key that they see, where their document begins.
        high: one past the last key of the last row; as ``low`` for padding.
    """

    first: int
    end: int
    low: int
    high: int


@dataclass(frozen=True)
class LayerRows:
    """Rows of a layer on this rank.

    Attributes:
        layer: number of the layer; 0 where it is not known.
        find_runs: returns the runs of the rows, on the host.
        batch: sequences of the microbatch.
        rows: of each sequence on this rank.
        keys: of each sequence.
        topk: keys that a row selects at most.
        tokens: ``[batch, rows]``, of the rows, on the device; None where this pipeline stage does not get
            them.
    """

    layer: int
    find_runs: Callable[[], Sequence[RowRun]]
    batch: int
    rows: int
    keys: int
    topk: int
    tokens: Tensor | None = None


@dataclass(frozen=True)
class Chosen:
    """Keys that rows attend to, as many as they see, or ``topk``.

    Attributes:
        topk_indices: ``[batch, rows, topk]`` int32, -1 at the tail, of all rows or, with ``by_run``, of each
            run; positions of keys in the sequence, or from the run's first key on. None where rows attend to
            all keys that they see.
        by_run: whether there is one selection for each run.
        missing: ``[batch, rows]`` bool, rows whose keys the indexer is to select; None: it selects none.
        is_shared: a layer below has selected them: this layer's indexer has no loss, and no source is told.
    """

    topk_indices: tuple[Tensor | None, ...]
    by_run: bool = False
    missing: Tensor | None = None
    is_shared: bool = False

    @property
    def of_all_rows(self) -> Tensor:
        """The selection of all rows, where they do not attend to all keys that they see."""
        (topk_indices,) = self.topk_indices
        assert topk_indices is not None, "whether a problem is dense depends on its rows alone"
        return topk_indices

    def to(self, device: torch.device) -> Chosen:
        """Return it on a device."""
        if device.type == "cpu":
            return self
        indices = tuple(None if each is None else each.to(device) for each in self.topk_indices)
        missing = None if self.missing is None else self.missing.to(device)
        return replace(self, topk_indices=indices, missing=missing)

    def without(self, runs: Sequence[RowRun]) -> Chosen:
        """Return it with the rows of some runs left to the indexer."""
        if not runs:
            return self
        shape = self.of_all_rows.shape[:2]
        missing = torch.zeros(shape, dtype=torch.bool) if self.missing is None else self.missing.clone()
        for first, end, *_ in runs:
            missing[:, first:end] = True
        return replace(self, missing=missing)

    def of(self, rows: slice, low: int = 0, keys: int | None = None) -> Chosen:
        """Return some of the rows.

        Args:
            rows: which.
            low: key that becomes the first one.
            keys: number of keys from there on; None: the width stays.
        """
        if self.topk_indices == (None,):
            return self
        indices = self.of_all_rows[:, rows]
        if low:
            indices = (indices - low).clamp_min_(-1)
        width = indices.shape[-1] if keys is None else min(indices.shape[-1], keys)
        missing = None if self.missing is None else self.missing[:, rows]
        return replace(self, topk_indices=(indices[..., :width],), missing=missing)

    def of_run(self, number: int, run: RowRun) -> Chosen:
        """Return the rows of one run, whose keys are counted from its first one."""
        if self.by_run:
            return replace(self, topk_indices=self.topk_indices[number : number + 1], by_run=False)
        return self.of(slice(run.first, run.end), run.low, run.high - run.low)


class SelectionSource:
    """Origin of selections, or observer of selections that were taken.

    Attributes:
        asked: whether a layer has asked for its keys, or told which it took.
    """

    asked = False

    def choose(self, rows: LayerRows) -> Chosen | None:
        """Return the keys that a layer's rows attend to, on the host or the device; None: declined."""
        return None

    def took(self, rows: LayerRows, chosen: Chosen, mass_of: Callable[[Tensor], Tensor]) -> None:
        """Note the keys that a layer's rows attended to.

        Args:
            rows: of the layer.
            chosen: the keys; fewer rows than the layer has where those at the end are padding.
            mass_of: returns each key's share of its row's attention, ``[batch, rows, topk]`` fp32, of a
                selection of all rows; called on all tensor parallel ranks or on none.
        """


@dataclass
class Microbatch:
    """One microbatch in one forward of the model, or of a pipeline chunk.

    Attributes:
        source: origin of its selections; None: indexers select.
        sink: observer of its selections; None: there is none.
        tokens: ``[batch, rows]`` of this rank, from the model's first stage on.
    """

    source: SelectionSource | None = None
    sink: SelectionSource | None = None
    tokens: Tensor | None = None


# -- selections that layers share ----------------------------------------------------------------


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
    place: Place | None = vars(attention).get(PLACE)
    return place


@dataclass
class Selected:
    """Keys that one layer has selected in one forward.

    Attributes:
        source: name of the layer.
        topk_indices: as of :class:`Chosen`, int of any width, and so is the next one.
        by_run: whether there is one selection for each run.
        lengths: ``[batch, rows]``, leading entries that count, if Megatron's kernels say so.
        reads: number of times that layers have read it.
    """

    source: str
    topk_indices: tuple[Tensor | None, ...]
    by_run: bool = False
    lengths: Tensor | None = None
    reads: int = 0


class Selections:
    """Holder of the latest selection and of the microbatch, in a forward or in one recomputation.

    Args:
        latest: selection at the beginning.
        microbatch: likewise.
    """

    def __init__(self, latest: Selected | None = None, microbatch: Microbatch | None = None) -> None:
        self.latest, self.microbatch = latest, microbatch

    def store(self, place: Place, *topk_indices: Tensor | None, by_run: bool = False) -> None:
        """Keep a layer's selection for the layers above, if one of them reads it."""
        if place.hands_on:
            self.latest = Selected(place.source, topk_indices, by_run)

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


@dataclass
class _Below(SelectionSource):
    """Selection of a layer below, for a layer with a place in sharing."""

    place: Place
    selections: Selections

    def choose(self, rows: LayerRows) -> Chosen | None:
        if not self.selections.is_shared_by(self.place):
            return None
        selected = self.selections.read(self.place)
        self.selections.release(self.place)
        return Chosen(selected.topk_indices, selected.by_run, is_shared=True)

    def took(self, rows: LayerRows, chosen: Chosen, mass_of: Callable[[Tensor], Tensor]) -> None:
        self.selections.store(self.place, *chosen.topk_indices, by_run=chosen.by_run)


# -- the running forward -------------------------------------------------------------------------

_current: ContextVar[Selections | None] = ContextVar("_current", default=None)


def current() -> Selections:
    """Return the holder of this thread, or of the recomputation that it is in."""
    holder = _current.get()
    if holder is None:
        holder = Selections()
        _current.set(holder)
    return holder


def sources_of(attention: Any) -> list[SelectionSource]:
    """Return the sources of a layer in the running forward, in the order in which they are asked.

    Args:
        attention: a ``DSAttention``, Megatron's or ours.

    Raises:
        RuntimeError: selections are recorded or replayed, and the layer has no number.
    """
    selections, place = current(), place_of(attention)
    found: list[SelectionSource] = [] if place is None else [_Below(place, selections)]
    microbatch = selections.microbatch
    if microbatch is None:
        return found
    ends = [each for each in (microbatch.source, microbatch.sink) if each is not None]
    if ends and NUMBER not in vars(attention):
        raise RuntimeError(
            "dsa-recorded-selections: a DSAttention was built outside of Megatron's TransformerLayer, "
            "which knows its number; build it inside one, or omit the flag"
        )
    return found + ends


@contextmanager
def recomputing(latest: Selected | None, microbatch: Microbatch | None = None) -> Iterator[None]:
    """Run once more as part of an earlier forward, and leave the running one alone.

    Args:
        latest: selection that layers of that forward have read.
        microbatch: of that forward, whose selections were observed the first time.
    """
    again = None if microbatch is None or microbatch.source is None else replace(microbatch, sink=None)
    token = _current.set(Selections(latest, again))
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
            with recomputing(self._read, self._microbatch):
                self._read = self._microbatch = None
                return self._function(*args, **kwargs)
        self._has_run = True
        selections = current()
        self._microbatch, latest = selections.microbatch, selections.latest
        reads = 0 if latest is None else latest.reads
        result = self._function(*args, **kwargs)
        if latest is not None and latest.reads > reads:
            self._read = latest
        return result
