"""Selections of a microbatch that come from elsewhere, or go elsewhere, on the way to its layers.

Whoever follows the schedule puts a :class:`Microbatch` down before each forward; core attentions ask it. A
recomputed layer finds that of its own forward, see :class:`.shared_selections.Carrying`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

NUMBER = "_mindspeed_dsa_layer_number"
"""Name under which a ``DSAttention`` has its layer's number, from 1; multi-token prediction counts on."""


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
        layer: number of the layer.
        runs: of the rows.
        batch: sequences of the microbatch.
        rows: of each sequence on this rank.
        keys: of each sequence.
        topk: keys that a row selects at most.
        tokens: ``[batch, rows]``, of the rows, on the device; None where this pipeline stage does not get
            them.
    """

    layer: int
    runs: Sequence[RowRun]
    batch: int
    rows: int
    keys: int
    topk: int
    tokens: Tensor | None = None


@dataclass(frozen=True)
class Replayed:
    """Keys that rows attend to, whatever the layer's indexer says: as many as they see, or ``topk``.

    Attributes:
        topk_indices: ``[batch, rows, min(topk, keys)]`` int32, positions in the sequence, ascending, -1 at
            the tail.
        missing: ``[batch, rows]`` bool, rows whose keys the indexer is to select; None: it selects none.
    """

    topk_indices: Tensor
    missing: Tensor | None = None

    def to(self, device: torch.device) -> Replayed:
        """Return it on a device."""
        if device.type == "cpu":
            return self
        missing = None if self.missing is None else self.missing.to(device)
        return replace(self, topk_indices=self.topk_indices.to(device), missing=missing)

    def without(self, runs: Sequence[tuple[int, int]]) -> Replayed:
        """Return it with some rows, first and end of each run, left to the indexer."""
        if not runs:
            return self
        shape = self.topk_indices.shape[:2]
        missing = torch.zeros(shape, dtype=torch.bool) if self.missing is None else self.missing.clone()
        for first, end in runs:
            missing[:, first:end] = True
        return replace(self, missing=missing)

    def of(self, rows: slice, low: int = 0, keys: int | None = None) -> Replayed:
        """Return some of the rows.

        Args:
            rows: which.
            low: key that becomes the first one.
            keys: how many there are from there on; None: the width stays.
        """
        indices = self.topk_indices[:, rows]
        if low:
            indices = (indices - low).clamp_min_(-1)
        width = indices.shape[-1] if keys is None else min(indices.shape[-1], keys)
        missing = None if self.missing is None else self.missing[:, rows]
        return Replayed(indices[..., :width], missing)


class Source(Protocol):
    """Origin of selections that are replayed.

    Attributes:
        asked: whether a layer has asked for its keys.
    """

    @property
    def asked(self) -> bool: ...

    def selection(self, rows: LayerRows) -> Replayed:
        """Return the keys of a layer's rows, on the host."""


class Sink(Protocol):
    """Destination of selections that are recorded.

    Attributes:
        wants_mass: whether to compute each key's share of the attention, on all tensor parallel ranks.
        asked: whether a layer has brought its selection.
    """

    @property
    def asked(self) -> bool: ...

    @property
    def wants_mass(self) -> bool: ...

    def take(
        self,
        rows: LayerRows,
        topk_indices: Sequence[Tensor | None],
        by_run: bool,
        mass: Tensor | None = None,
    ) -> None:
        """Take what rows attended to.

        Args:
            rows: of the layer.
            topk_indices: ``[batch, rows, topk]``, or fewer rows without padding at the end; None where rows
                attend to all keys that they see.
            by_run: there is one for each run, whose keys are counted from its first one.
            mass: ``[batch, rows, topk]`` fp32, each key's share of its row's attention, if it is wanted and
                the selection is in one piece.
        """


@dataclass
class Microbatch:
    """One microbatch in one forward of the model, or of a pipeline chunk.

    Attributes:
        source: where its selections come from; None: indexers select.
        sink: where they go; None: nowhere.
        tokens: ``[batch, rows]`` of this rank, from the model's first stage on.
    """

    source: Source | None = None
    sink: Sink | None = None
    tokens: Tensor | None = None


_current: ContextVar[Microbatch | None] = ContextVar("_current", default=None)


def current() -> Microbatch | None:
    """Return the microbatch whose forward, or recomputation, this thread is in."""
    return _current.get()


def put_down(microbatch: Microbatch | None) -> None:
    """Say which microbatch's forward comes next in this thread."""
    _current.set(microbatch)


@contextmanager
def recomputing(microbatch: Microbatch | None) -> Iterator[None]:
    """Run once more as part of a microbatch, whose selections have been recorded the first time."""
    again = None if microbatch is None or microbatch.source is None else replace(microbatch, sink=None)
    token = _current.set(again)
    try:
        yield
    finally:
        _current.reset(token)
