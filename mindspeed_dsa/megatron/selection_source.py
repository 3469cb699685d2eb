"""Exchange of key selections: between layers that share them, and with features that record or replay them.

Core attention asks the sources of its layer (:func:`sources_of`) for selected keys. It uses the selection of
the first source that has one, else the indexer's selection, and reports its choice to all sources. The
sources are

* for a layer that shares: the selection of the nearest layer below with an indexer. Layers of a chunk run in
  order, so only one selection is stored at a time. The last layer that reads it releases it;
* the ``source`` and ``sink`` of the current :class:`Microbatch`, which the record and replay feature sets
  before each forward.

Recomputation breaks the order. A sharing layer runs again in backward, before the layer that it shares with,
and while other microbatches are in flight. A checkpointed function therefore keeps its microbatch and the
selection that one of its layers has read (:class:`Carrying`). It drops both when it runs again, because
autograd keeps the function alive as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.megatron.served_index import ServedGradients, ServedIndex

NUMBER = "_mindspeed_dsa_layer_number"
"""Attribute of a ``DSAttention`` with its layer number, from 1; multi-token prediction layers follow."""
PLACE = "_mindspeed_dsa_place"
"""Attribute of a ``DSAttention`` with its :class:`Place`."""


# -- interface between core attention and sources ------------------------------------------------


class RowRun(NamedTuple):
    """Contiguous tokens of one document on a rank.

    Attributes:
        first: index of the first token on this rank.
        end: index after the last token.
        low: position of the first visible key, where the document begins.
        high: position after the last key visible to the last token; equal to ``low`` for padding.
    """

    first: int
    end: int
    low: int
    high: int


@dataclass(frozen=True)
class LayerRows:
    """Description of the query tokens that a layer processes on this rank.

    Attributes:
        layer: layer number; 0 if unknown.
        find_runs: function that splits the tokens into :class:`RowRun` entries, with numbers on the host.
        batch: number of sequences in the microbatch.
        rows: number of query tokens per sequence on this rank.
        keys: number of keys per sequence.
        topk: upper bound of the number of selected keys per token.
        tokens: token ids ``[batch, rows]`` on the device; ``None`` if this pipeline stage does not get them.
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
    """Keys that query tokens attend to: all visible keys, or ``topk`` of them.

    Attributes:
        topk_indices: ``[batch, rows, topk]`` int32, padded with -1 at the end; one tensor for all tokens, or
            one per run with ``by_run``. Values are key positions in the sequence, or relative to the run's
            first key. ``None`` means that tokens attend to all visible keys.
        by_run: whether ``topk_indices`` has one tensor per :class:`RowRun` instead of one for all tokens.
        missing: ``[batch, rows]`` bool, tokens for which the indexer must select; ``None`` for none.
        is_shared: whether a layer below selected the keys. The layer that uses them then does not report the
            selection to sources, and computes an indexer loss only with ``index``.
        index: outputs of the indexer that selected, one per entry of ``topk_indices``, for losses of layers
            that share. Empty if no such loss reads them.
    """

    topk_indices: tuple[Tensor | None, ...]
    by_run: bool = False
    missing: Tensor | None = None
    is_shared: bool = False
    index: tuple[ServedIndex | None, ...] = ()

    @property
    def of_all_rows(self) -> Tensor:
        """Selected keys of all tokens, ``[batch, rows, topk]``; ``None`` (all visible keys) is an error."""
        (topk_indices,) = self.topk_indices
        assert topk_indices is not None, "whether a problem is dense depends on its rows alone"
        return topk_indices

    def to(self, device: torch.device) -> Chosen:
        """Return a copy with all tensors on a device."""
        if device.type == "cpu":
            return self
        indices = tuple(None if tensor is None else tensor.to(device) for tensor in self.topk_indices)
        missing = None if self.missing is None else self.missing.to(device)
        return replace(self, topk_indices=indices, missing=missing)

    def without(self, runs: Sequence[RowRun]) -> Chosen:
        """Return a copy in which the tokens of ``runs`` are missing: the indexer selects for them."""
        if not runs:
            return self
        shape = self.of_all_rows.shape[:2]
        missing = torch.zeros(shape, dtype=torch.bool) if self.missing is None else self.missing.clone()
        for first, end, *_ in runs:
            missing[:, first:end] = True
        return replace(self, missing=missing)

    def of(self, rows: slice, low: int = 0, keys: int | None = None) -> Chosen:
        """Return the selection of a slice of the tokens, with key positions relative to ``low``.

        Args:
            rows: slice of the tokens.
            low: first key position of the tokens' document.
            keys: number of visible keys from ``low`` on, an upper bound of the returned ``topk``; ``None``
                keeps ``topk``.
        """
        if self.topk_indices == (None,):
            return self
        indices = self.of_all_rows[:, rows]
        if low:
            # The run's keys begin at `low`. -1 (no key) becomes smaller and is clamped back to -1.
            indices = (indices - low).clamp_min_(-1)
        width = indices.shape[-1] if keys is None else min(indices.shape[-1], keys)
        missing = None if self.missing is None else self.missing[:, rows]
        return replace(self, topk_indices=(indices[..., :width],), missing=missing)

    def of_run(self, number: int, run: RowRun) -> Chosen:
        """Return the selection of one run, with key positions relative to the run's first key."""
        if self.by_run:
            one = slice(number, number + 1)
            return replace(self, topk_indices=self.topk_indices[one], by_run=False, index=self.index[one])
        return self.of(slice(run.first, run.end), run.low, run.high - run.low)


class SelectionSource:
    """Base class of objects that choose a layer's keys (:meth:`choose`) or observe them (:meth:`took`).

    Attributes:
        asked: whether a layer has asked for its keys, or has reported its selection.
    """

    asked = False

    def choose(self, rows: LayerRows) -> Chosen | None:
        """Return the keys that a layer's tokens attend to, on any device; ``None`` to let others choose."""
        return None

    def took(self, rows: LayerRows, chosen: Chosen, mass_of: Callable[[Tensor], Tensor]) -> None:
        """Called after attention with the keys that the layer's tokens attended to.

        Args:
            rows: layer's tokens.
            chosen: selected keys. Padding tokens at the end may be left out.
            mass_of: function from ``topk_indices`` of all tokens to the attention probability of each
                selected key, ``[batch, rows, topk]`` fp32. Call it on all tensor parallel ranks or on none.
        """


@dataclass
class Microbatch:
    """Microbatch that the model, or one pipeline chunk, currently processes in forward.

    Attributes:
        source: provider of the microbatch's selections; ``None`` means that indexers select.
        sink: observer of the microbatch's selections, or ``None``.
        tokens: this rank's token ids ``[batch, rows]``, set when ``GPTModel.forward`` begins; ``None`` on
            pipeline stages without the embedding.
    """

    source: SelectionSource | None = None
    sink: SelectionSource | None = None
    tokens: Tensor | None = None


# -- selections that layers share ----------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Position of one layer among the layers that share key selections.

    Attributes:
        name: layer's name, for messages and to identify its selection.
        source: name of the layer that selects keys for this layer; equal to ``name`` if it has an indexer.
        hands_on: whether layers above reuse the selection that this layer computes.
        is_last: whether no layer above uses the same selection.
        repeats: whether the layer runs several times in one forward; it selects only in the first run.
        served: number of layers that attend to the same selection, with the layer that selects.
    """

    name: str
    source: str
    hands_on: bool = False
    is_last: bool = True
    repeats: bool = False
    served: int = 1

    @property
    def computes(self) -> bool:
        """Whether the layer has an indexer."""
        return self.name == self.source


def place_of(attention: Any) -> Place | None:
    """Return the :class:`Place` of a ``DSAttention``, or ``None`` in a model without shared selections."""
    place: Place | None = vars(attention).get(PLACE)
    return place


@dataclass
class Selected:
    """Keys that one layer has selected in one forward.

    Attributes:
        source: layer's name.
        topk_indices: see :class:`Chosen`, of any int dtype.
        by_run: whether ``topk_indices`` has one tensor per :class:`RowRun`.
        lengths: ``[batch, rows]``, number of valid leading entries, if Megatron's kernels return it.
        index: see :class:`Chosen`.
        reads: number of times that layers have read the selection.
    """

    source: str
    topk_indices: tuple[Tensor | None, ...]
    by_run: bool = False
    lengths: Tensor | None = None
    index: tuple[ServedIndex | None, ...] = ()
    reads: int = 0

    @property
    def gradients(self) -> ServedGradients | None:
        """Sums of the gradients of ``index``, which all runs of tokens have in common."""
        return next((one.gradients for one in self.index if one is not None), None)


class Selections:
    """Latest shared selection and current microbatch of a running forward, or of one recomputation.

    Args:
        latest: initial selection.
        microbatch: initial microbatch.
        served: name and gradients of the layer that selected in the first run; None outside recomputation.

    Attributes:
        reads: number of times that layers have read a selection.
    """

    def __init__(
        self,
        latest: Selected | None = None,
        microbatch: Microbatch | None = None,
        served: tuple[str, ServedGradients] | None = None,
    ) -> None:
        self.latest, self.microbatch, self._served = latest, microbatch, served
        self.reads = 0

    def store(
        self,
        place: Place,
        *topk_indices: Tensor | None,
        by_run: bool = False,
        index: tuple[ServedIndex | None, ...] = (),
    ) -> None:
        """Store a layer's selection for the layers above, if one of them uses it."""
        if place.hands_on:
            self.latest = Selected(place.source, topk_indices, by_run, index=index)

    def gradients_for(self, place: Place) -> ServedGradients:
        """Return the sums into which layers above deliver the gradients of a selecting layer's indexer.

        In a recomputation these are the sums of the first run, whose selection the layers above have read.
        """
        if self._served is not None and self._served[0] == place.source:
            return self._served[1]
        return ServedGradients()

    def read(self, place: Place) -> Selected:
        """Return the stored selection of the layer below that the sharing layer ``place`` uses.

        Raises:
            RuntimeError: the source layer has not run before it.
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
        self.reads += 1
        return latest

    def release(self, place: Place) -> None:
        """Drop the stored selection if the layer ``place`` is the last one that reads it."""
        if place.is_last:
            self.latest = None

    def is_shared_by(self, place: Place) -> bool:
        """Return whether a layer uses a stored selection instead of computing one."""
        if place.repeats:
            return self.latest is not None and self.latest.source == place.source
        return not place.computes


@dataclass
class _Below(SelectionSource):
    """Source for sharing: gives a sharing layer the selection of a layer below.

    A computing layer reports its selection here for the layers above.
    """

    place: Place
    selections: Selections

    def choose(self, rows: LayerRows) -> Chosen | None:
        if not self.selections.is_shared_by(self.place):
            return None
        selected = self.selections.read(self.place)
        # This layer has the tensors now. If it is the last reader, the holder need not keep them.
        self.selections.release(self.place)
        return Chosen(selected.topk_indices, selected.by_run, is_shared=True, index=selected.index)

    def took(self, rows: LayerRows, chosen: Chosen, mass_of: Callable[[Tensor], Tensor]) -> None:
        self.selections.store(self.place, *chosen.topk_indices, by_run=chosen.by_run, index=chosen.index)


# -- the running forward -------------------------------------------------------------------------

_current: ContextVar[Selections | None] = ContextVar("_current", default=None)


def current() -> Selections:
    """Return this thread's :class:`Selections`; inside a recomputation, the recomputation's own."""
    holder = _current.get()
    if holder is None:
        holder = Selections()
        _current.set(holder)
    return holder


def sources_of(attention: Any) -> list[SelectionSource]:
    """Return the sources of a layer in the running forward, in the order in which they are asked.

    Args:
        attention: ``DSAttention``, Megatron's or ours.

    Raises:
        RuntimeError: selections are recorded or replayed, but the layer has no number.
    """
    selections, place = current(), place_of(attention)
    sources: list[SelectionSource] = [] if place is None else [_Below(place, selections)]
    microbatch = selections.microbatch
    if microbatch is None:
        return sources
    ends = [source for source in (microbatch.source, microbatch.sink) if source is not None]
    if ends and NUMBER not in vars(attention):
        raise RuntimeError(
            "dsa-recorded-selections: a DSAttention was built outside of Megatron's TransformerLayer, "
            "which knows its number; build it inside one, or omit the flag"
        )
    return sources + ends


@contextmanager
def recomputing(
    latest: Selected | None,
    microbatch: Microbatch | None = None,
    served: tuple[str, ServedGradients] | None = None,
) -> Iterator[None]:
    """Run the block with the selections of an earlier forward, leaving the running forward's unchanged.

    Args:
        latest: selection that layers of the earlier forward have read.
        microbatch: microbatch of the earlier forward. Its sink gets no second report of the selections.
        served: see :class:`Selections`.
    """
    # Without a sink: the selections were observed in the first run.
    again = None if microbatch is None or microbatch.source is None else replace(microbatch, sink=None)
    token = _current.set(Selections(latest, again, served))
    try:
        yield
    finally:
        _current.reset(token)


class Carrying:
    """Wrapper of a checkpointed function: the recomputation uses the shared selection of the first run.

    Args:
        function: function that is called once in forward and once in backward.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._has_run, self._is_spent = function, False, False
        self._read: Selected | None = None
        self._microbatch: Microbatch | None = None
        # Layers above deliver gradients for the first run's selection, which the recomputation has to add.
        self._served: tuple[str, ServedGradients] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. The second call, the recomputation, uses the selection that the first one read.

        Raises:
            RuntimeError: the function's layers share or replay a selection, and were already recomputed once.
        """
        if self._is_spent:
            raise RuntimeError(
                "dsa-shared-selections: layers that share or replay a selection were recomputed twice, and "
                "the selection is freed after the first time; omit retain_graph in backward, or do not "
                "recompute them"
            )
        if self._has_run:
            replays = self._microbatch is not None and self._microbatch.source is not None
            # The selection is dropped below, so a second recomputation would not find it.
            self._is_spent = replays or self._read is not None
            # Drop the references first: autograd keeps this object as long as the graph.
            with recomputing(self._read, self._microbatch, self._served):
                self._read = self._microbatch = None
                return self._function(*args, **kwargs)
        self._has_run = True
        selections = current()
        self._microbatch, latest = selections.microbatch, selections.latest
        # `reads` grows if a layer inside the function reads a selection from before it.
        reads = 0 if latest is None else latest.reads
        result = self._function(*args, **kwargs)
        if latest is not None and latest.reads > reads:
            self._read = latest
        stored = selections.latest
        if stored is not None and stored is not latest and stored.gradients is not None:
            self._served = stored.source, stored.gradients
        return result
