"""Selections that layers attend to: of a recording, or handed over with a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mindspeed_dsa.features.dsa.recorded_selections.feature import REFUSE, REPLAY, SELECT
from mindspeed_dsa.megatron import replayed_selections
from mindspeed_dsa.megatron.replayed_selections import LayerRows, Microbatch, Replayed
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.selection_rows import Ints, Longs, WrongRows, ascending
from mindspeed_dsa.runs.selections import Header, Key, Recording

Bools = npt.NDArray[np.bool_]


class SelectionError(MindSpeedDSAError):
    """Selection that cannot be replayed; the message names the row and says what to do."""


class Found:
    """Keys that somebody has for some rows.

    Args:
        keys: ``[rows, width]``, counted from the begin of the row's document, in any order, negative where
            there is none.
        has: ``[rows]``, whether there is something for the row.
        documents: ``[rows]``, where the rows' documents began; None: where those of the batch do.
    """

    def __init__(self, keys: Ints | Longs, has: Bools, documents: Ints | None = None) -> None:
        self.keys, self.has, self.documents = keys, has, documents


class _Source(ABC):
    """Origin of selections, which are checked row by row.

    Args:
        missing: what becomes of a row without, :data:`REFUSE` or :data:`SELECT`.

    Attributes:
        asked: whether a layer has asked for its keys.
    """

    def __init__(self, missing: str) -> None:
        self._missing, self.asked = missing, False

    @abstractmethod
    def found(self, rows: LayerRows, sequence: int, positions: Ints, at: Longs) -> Found:
        """Return what there is for a sequence of the microbatch.

        Args:
            rows: of the layer.
            sequence: of the microbatch.
            positions: of the rows in the sequence.
            at: of the rows on this rank.
        """

    @abstractmethod
    def place(self, rows: LayerRows, sequence: int) -> str:
        """Return words for a sequence of the microbatch in a layer, for messages."""

    def selection(self, rows: LayerRows) -> Replayed:
        """Return the keys of a layer's rows, on the host.

        Raises:
            SelectionError: they are of other documents, or no selection, or missing and not to be selected.
        """
        self.asked = True
        runs = [run for run in rows.runs if run.high > run.low]
        at = np.concatenate([np.arange(run.first, run.end) for run in runs] or [np.zeros(0, np.int64)])
        positions = np.concatenate(
            [np.arange(run.high - (run.end - run.first), run.high, dtype=np.int32) for run in runs]
            or [np.zeros(0, np.int32)]
        )
        low = np.repeat(np.array([run.low for run in runs], np.int32), [run.end - run.first for run in runs])
        visible, width = positions - low + 1, min(rows.topk, rows.keys)
        out = np.full((rows.batch, rows.rows, width), -1, np.int32)
        missing = np.zeros((rows.batch, rows.rows), np.bool_)
        for sequence in range(rows.batch):
            found = self.found(rows, sequence, positions, at)
            keys = self._checked(found, rows, sequence, positions, low, visible)
            counts = np.count_nonzero(keys >= 0, axis=1)
            lacks = ~found.has | (counts < np.minimum(visible, rows.topk))
            if lacks.any() and self._missing == REFUSE:
                row = int(lacks.argmax())
                what = "has no selection"
                if found.has[row]:
                    what = f"has {counts[row]} keys and sees {visible[row]}"
                raise SelectionError(
                    f"{self.place(rows, sequence)}: row {positions[row]} {what}; record all that is "
                    f"replayed, or let the indexer select there by --dsa-replay-missing {SELECT}"
                )
            out[sequence, at] = np.where(keys >= 0, keys + low[:, None], -1)
            missing[sequence, at] = lacks
        return Replayed(torch.from_numpy(out), torch.from_numpy(missing) if missing.any() else None)

    def _checked(
        self,
        found: Found,
        rows: LayerRows,
        sequence: int,
        positions: Ints,
        low: Ints,
        visible: Ints,
    ) -> Ints:
        """Return keys in ascending order, -1 at the tail, as wide as the operators want them."""
        if found.documents is not None and (foreign := found.has & (found.documents != low)).any():
            row = int(foreign.argmax())
            raise SelectionError(
                f"{self.place(rows, sequence)}: row {positions[row]} belongs to a document that begins at "
                f"{low[row]}, and at {found.documents[row]} where its selection was made; replay it with the "
                "same data in the same order"
            )
        try:
            keys = ascending(found.keys, visible)
        except WrongRows as error:
            raise SelectionError(
                f"{self.place(rows, sequence)}: row {positions[error.row]} {error}; this is no selection "
                f"for it"
            ) from error
        width = min(rows.topk, rows.keys)
        if (keys[:, width:] >= 0).any():
            row = int((keys[:, width:] >= 0).any(axis=1).argmax())
            raise SelectionError(
                f"{self.place(rows, sequence)}: row {positions[row]} has {np.count_nonzero(keys[row] >= 0)} "
                f"keys, and the model selects {rows.topk}; this is a selection of another model"
            )
        padding = max(0, width - keys.shape[1])
        return np.pad(keys[:, :width], ((0, 0), (0, padding)), constant_values=-1)


class Recorded(_Source):
    """Selections of a recording for one microbatch.

    Args:
        recording: it.
        step: number of the step.
        place: of the microbatch among those of the step's global batch.
        missing: as of :class:`_Source`.
    """

    def __init__(self, recording: Recording, step: int, place: int, missing: str) -> None:
        super().__init__(missing)
        self._recording, self._step, self._place = recording, step, place
        self._tokens: npt.NDArray[np.int64] | None = None

    def _key(self, rows: LayerRows, sequence: int) -> Key:
        return Key(self._step, self._place * rows.batch + sequence, rows.layer)

    def place(self, rows: LayerRows, sequence: int) -> str:
        """Do as :meth:`_Source.place` says."""
        step, number, layer = self._key(rows, sequence)
        return f"{REPLAY} {self._recording.folder}: step {step}, sequence {number}, layer {layer}"

    def found(self, rows: LayerRows, sequence: int, positions: Ints, at: Longs) -> Found:
        """Do as :meth:`_Source.found` says."""
        try:
            recorded = self._recording.rows(self._key(rows, sequence))
        except RunError as error:
            if self._missing == REFUSE:
                raise SelectionError(
                    f"{REPLAY}: {error}; let the indexer select there by --dsa-replay-missing {SELECT}"
                ) from error
            recorded = None
        if recorded is None:
            return Found(np.full((len(positions), 0), -1, np.int32), np.zeros(len(positions), np.bool_))
        order = np.argsort(recorded.positions, kind="stable")
        sorted_positions = recorded.positions[order]
        place = np.searchsorted(sorted_positions, positions).clip(max=len(order) - 1)
        has = sorted_positions[place] == positions
        chosen = order[place]
        if recorded.tokens is not None and rows.tokens is not None:
            if self._tokens is None:
                self._tokens = rows.tokens.cpu().numpy()
            others = has & (recorded.tokens[chosen] != (self._tokens[sequence, at] & 0xFFFF))
            if others.any():
                raise SelectionError(
                    f"{self.place(rows, sequence)}: row {positions[others.argmax()]} has another token than "
                    "it had when its selection was made; replay it with the same data in the same order"
                )
        keys = np.where(has[:, None], recorded.keys[chosen], -1)
        return Found(keys, has, recorded.documents[chosen])


class HandedOver(_Source):
    """Selections that a job hands over with a microbatch.

    Args:
        header: of the model.
        missing: as of :class:`_Source`.
    """

    def __init__(self, header: Header, missing: str) -> None:
        super().__init__(missing)
        self.header = header
        self._array: Tensor | None = None

    def give(self, topk_indices: Tensor) -> None:
        """Take the microbatch's selections, as :func:`hand_over` says."""
        columns = len(self.header.computing)
        if topk_indices.dim() not in (3, 4) or topk_indices.shape[-2] != columns:
            raise SelectionError(
                f"{REPLAY} batch: selections are {list(topk_indices.shape)}; hand over [tokens, {columns}, "
                f"topk] or [batch, tokens, {columns}, topk]: {columns} layers of the model select keys"
            )
        if topk_indices.is_floating_point() or topk_indices.is_complex():
            raise SelectionError(
                f"{REPLAY} batch: selections are {topk_indices.dtype}; hand over positions as integers"
            )
        array = topk_indices.detach()
        if array.dtype not in (torch.int32, torch.int64):
            array = array.long()
            if topk_indices.dtype == torch.uint64 and bool((array < 0).any()):
                raise SelectionError(
                    f"{REPLAY} batch: selections list keys from 2 ** 63 on; hand over positions in a document"
                )
        self._array = array

    def place(self, rows: LayerRows, sequence: int) -> str:
        """Do as :meth:`_Source.place` says."""
        return f"{REPLAY} batch: sequence {sequence} of the microbatch, layer {rows.layer}"

    def found(self, rows: LayerRows, sequence: int, positions: Ints, at: Longs) -> Found:
        """Do as :meth:`_Source.found` says."""
        if self._array is None:
            return Found(np.full((len(positions), 0), -1, np.int32), np.zeros(len(positions), np.bool_))
        array = self._array
        if array.dim() == 3:
            if array.shape[0] % rows.batch:
                raise SelectionError(
                    f"{self.place(rows, sequence)}: {array.shape[0]} tokens were handed over, which are not "
                    f"those of {rows.batch} sequences; hand over [batch, tokens, layers, topk]"
                )
            array = array.unflatten(0, (rows.batch, -1))
        elif array.shape[0] != rows.batch:
            raise SelectionError(
                f"{self.place(rows, sequence)}: {array.shape[0]} sequences were handed over, and the "
                f"microbatch has {rows.batch}"
            )
        of_layer = array[sequence, :, self.header.computing.index(rows.layer)]  # [tokens, topk]
        if (of_layer[rows.keys :] >= 0).any():
            raise SelectionError(
                f"{self.place(rows, sequence)}: keys of {len(of_layer)} tokens were handed over, and the "
                f"sequence has {rows.keys}; hand over those of this microbatch"
            )
        has = positions < of_layer.shape[0]
        chosen = torch.from_numpy(positions.clip(max=of_layer.shape[0] - 1)).to(of_layer.device)
        keys = of_layer.index_select(0, chosen.long()).cpu().numpy()
        has &= (keys >= 0).any(axis=1)
        return Found(np.where(has[:, None], keys, -1), has)


def hand_over(topk_indices: Tensor) -> None:
    """Give the keys that the layers of this microbatch's forward attend to.

    Called in the job's ``forward_step``, on every rank, before the model is. Every rank gets those of the
    whole microbatch, all layers and all rows, and takes its own: under context, tensor and pipeline
    parallelism alike.

    Args:
        topk_indices: ``[tokens, computing layers, topk]`` of any integer type, on any device, with the
            tokens of one sequence, or pack, behind those of the other; or ``[batch, tokens, computing
            layers, topk]``. Layers that share a selection have none; those of multi-token prediction follow
            the decoder's. Keys are counted from the first token of the document, in any order, -1 where
            there is none.

    Raises:
        SelectionError: the shape is another one, these are no integers, or ``--dsa-replay-selections
            batch`` is not on.
    """
    _waiting().give(topk_indices)


def waiting_header() -> Header:
    """Return the model of the microbatch that waits for its selections.

    Raises:
        SelectionError: none does.
    """
    return _waiting().header


def _waiting() -> HandedOver:
    microbatch = replayed_selections.current()
    if microbatch is None or not isinstance(microbatch.source, HandedOver):
        raise SelectionError(
            f"selections were handed over outside of a microbatch's forward, or without {REPLAY} batch; call "
            "it in the function that Megatron's schedule calls for each microbatch, or run the model below "
            "`replaying`"
        )
    return microbatch.source


@contextmanager
def replaying(header: Header, topk_indices: Tensor, missing: str = REFUSE) -> Iterator[None]:
    """Have forwards of a model attend to these keys, in a job that calls it without Megatron's schedules.

    Args:
        header: of the model, :func:`.feature.header_of` its configuration.
        topk_indices: as of :func:`hand_over`.
        missing: what becomes of a row without keys, ``refuse`` or ``select``.
    """
    source, before = HandedOver(header, missing), replayed_selections.current()
    source.give(topk_indices)
    replayed_selections.put_down(Microbatch(source))
    try:
        yield
    finally:
        replayed_selections.put_down(before)
