"""Selections that layers attend to: of a recording, or handed over with a batch.

An inference engine records a request: a row for each token that it has read, so none for the last one that
it has generated. A training step packs several requests, each padded to a multiple that its layout wants,
and may have padding of its own behind them.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mindspeed_dsa.features.dsa.selections.feature import REFUSE, REPLAY, SELECT
from mindspeed_dsa.features.dsa.selections.format import Header, Key, Recording, Run, Writer, free_rank
from mindspeed_dsa.features.dsa.selections.rows import Ints, Longs, WrongRows, ascending
from mindspeed_dsa.megatron.selection_source import Chosen, LayerRows, Microbatch, SelectionSource, current
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.runs.files import RunError


class SelectionError(MindSpeedDSAError):
    """Selection that cannot be replayed; the message names the row and says what to do."""


# -- sources -------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Keys that a source has for some rows.

    Attributes:
        keys: ``[rows, width]``, counted from the begin of the row's document, in any order, negative where
            there is none.
        has: ``[rows]``, whether there is something for the row.
        documents: ``[rows]``, where the rows' documents began; None: where those of the batch do.
    """

    keys: npt.NDArray[Any]
    has: npt.NDArray[np.bool_]
    documents: Ints | None = None

    @classmethod
    def nothing(cls, rows: int) -> Found:
        """Make what a source returns that has none of the rows."""
        return cls(np.full((rows, 0), -1, np.int32), np.zeros(rows, np.bool_))


class _Replay(SelectionSource, ABC):
    """Origin of selections, which are checked row by row.

    Args:
        missing: what becomes of a row without, :data:`REFUSE` or :data:`SELECT`.
    """

    def __init__(self, missing: str) -> None:
        self._missing = missing

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

    def choose(self, rows: LayerRows) -> Chosen:
        """Return the keys of a layer's rows, on the host, ascending.

        Raises:
            SelectionError: they are of other documents, or no selection, or missing and not to be selected.
        """
        self.asked = True
        # First and end on this rank, and where the keys begin and end.
        runs = np.array([run for run in rows.find_runs() if run.high > run.low], np.int32).reshape(-1, 4)
        counts = runs[:, 1] - runs[:, 0]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        at, low = np.repeat(runs[:, 0], counts) + within, np.repeat(runs[:, 2], counts)
        positions = (np.repeat(runs[:, 3] - counts, counts) + within).astype(np.int32)
        visible, width = positions - low + 1, min(rows.topk, rows.keys)
        out = np.full((rows.batch, rows.rows, width), -1, np.int32)
        missing = np.zeros((rows.batch, rows.rows), np.bool_)
        for sequence in range(rows.batch):
            found = self.found(rows, sequence, positions, at)
            keys = self._checked(found, rows, sequence, positions, low)
            listed = np.count_nonzero(keys >= 0, axis=1)
            lacks = ~found.has | (listed < np.minimum(visible, rows.topk))
            if lacks.any() and self._missing == REFUSE:
                row = int(lacks.argmax())
                what = "has no selection"
                if found.has[row]:
                    what = f"has {listed[row]} keys and sees {visible[row]}"
                raise SelectionError(
                    f"{self.place(rows, sequence)}: row {positions[row]} {what}; record all that is "
                    f"replayed, or let the indexer select there by --dsa-replay-missing {SELECT}"
                )
            out[sequence, at] = np.where(keys >= 0, keys + low[:, None], -1)
            missing[sequence, at] = lacks
        return Chosen((torch.from_numpy(out),), missing=torch.from_numpy(missing) if missing.any() else None)

    def _checked(self, found: Found, rows: LayerRows, sequence: int, positions: Ints, low: Ints) -> Ints:
        """Return keys in ascending order, -1 at the tail, as wide as the operators want them."""
        place = f"{self.place(rows, sequence)}: row"
        if found.documents is not None and (foreign := found.has & (found.documents != low)).any():
            row = int(foreign.argmax())
            raise SelectionError(
                f"{place} {positions[row]} belongs to a document that begins at {low[row]}, and at "
                f"{found.documents[row]} where its selection was made; replay it with the same data in the "
                "same order"
            )
        try:
            keys = ascending(found.keys, positions - low + 1)
        except WrongRows as error:
            raise SelectionError(
                f"{place} {positions[error.row]} {error}; this is no selection for it"
            ) from error
        width = min(rows.topk, rows.keys)
        if (more := (keys[:, width:] >= 0).any(axis=1)).any():
            row = int(more.argmax())
            raise SelectionError(
                f"{place} {positions[row]} has {np.count_nonzero(keys[row] >= 0)} keys, and the model "
                f"selects {rows.topk}; this is a selection of another model"
            )
        padding = max(0, width - keys.shape[1])
        return np.pad(keys[:, :width], ((0, 0), (0, padding)), constant_values=-1)


class Recorded(_Replay):
    """Selections of a recording for one microbatch.

    Args:
        recording: it.
        step: number of the step.
        place: of the microbatch among those of the step's global batch.
        missing: as of :class:`_Replay`.
    """

    def __init__(self, recording: Recording, step: int, place: int, missing: str) -> None:
        super().__init__(missing)
        self._recording, self._step, self._place = recording, step, place
        self._tokens: npt.NDArray[np.int64] | None = None

    def _key(self, rows: LayerRows, sequence: int) -> Key:
        return Key(self._step, self._place * rows.batch + sequence, rows.layer)

    def place(self, rows: LayerRows, sequence: int) -> str:
        """Do as :meth:`_Replay.place` says."""
        step, number, layer = self._key(rows, sequence)
        return f"{REPLAY} {self._recording.folder}: step {step}, sequence {number}, layer {layer}"

    def found(self, rows: LayerRows, sequence: int, positions: Ints, at: Longs) -> Found:
        """Do as :meth:`_Replay.found` says."""
        try:
            recorded = self._recording.rows(self._key(rows, sequence))
        except RunError as error:
            if self._missing == REFUSE:
                raise SelectionError(
                    f"{REPLAY}: {error}; let the indexer select there by --dsa-replay-missing {SELECT}"
                ) from error
            recorded = None
        if recorded is None:
            return Found.nothing(len(positions))
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


class HandedOver(_Replay):
    """Selections that a job hands over with a microbatch.

    Args:
        header: of the model.
        missing: as of :class:`_Replay`.
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
        """Do as :meth:`_Replay.place` says."""
        return f"{REPLAY} batch: sequence {sequence} of the microbatch, layer {rows.layer}"

    def found(self, rows: LayerRows, sequence: int, positions: Ints, at: Longs) -> Found:
        """Do as :meth:`_Replay.found` says."""
        array = self._array
        if array is None:
            return Found.nothing(len(positions))
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
        tokens = of_layer.shape[0]
        if (of_layer[rows.keys :] >= 0).any():
            raise SelectionError(
                f"{self.place(rows, sequence)}: keys of {tokens} tokens were handed over, and the "
                f"sequence has {rows.keys}; hand over those of this microbatch"
            )
        chosen = torch.from_numpy(positions.clip(max=tokens - 1)).to(of_layer.device)
        keys = of_layer.index_select(0, chosen.long()).cpu().numpy()
        has = (positions < tokens) & (keys >= 0).any(axis=1)
        return Found(np.where(has[:, None], keys, -1), has)


# -- handing over --------------------------------------------------------------------------------


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


def _waiting() -> HandedOver:
    """Return the running microbatch's source, which waits for its selections."""
    microbatch = current().microbatch
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
    selections, source = current(), HandedOver(header, missing)
    source.give(topk_indices)
    before, selections.microbatch = selections.microbatch, Microbatch(source)
    try:
        yield
    finally:
        selections.microbatch = before


def hand_over_requests(requests: Sequence[Ints | Tensor], lengths: Sequence[int], cu_seqlens: Tensor) -> None:
    """Give the keys of a microbatch that is a pack of requests, as :func:`hand_over` does.

    Args:
        requests: as of :func:`in_pack`, and so are the next two.
        lengths: tokens of each request.
        cu_seqlens: where they begin.

    Raises:
        SelectionError: they do not fit, or ``--dsa-replay-selections batch`` is not on.
    """
    hand_over(in_pack(requests, lengths, cu_seqlens, _waiting().header))


def decode(encoded: str | bytes, tokens: int, layers: int) -> Ints:
    """Return the selection of a request that SGLang has returned in ``meta_info["indexer_topk"]``.

    Args:
        encoded: its numbers, int32, as base64.
        tokens: of the request, prompt and response; there is a row for all but the last.
        layers: ``meta_info["indexer_topk_num_layers"]``.

    Returns:
        ``[tokens - 1, layers, topk]`` int32.

    Raises:
        SelectionError: there are not so many numbers.
    """
    numbers = np.frombuffer(base64.b64decode(encoded), "<i4")
    cells = (tokens - 1) * layers
    if cells <= 0 or len(numbers) % cells:
        raise SelectionError(
            f"a recorded request has {len(numbers)} keys, which are not of {tokens - 1} tokens in {layers} "
            "layers; give the number of its tokens, prompt and response, and indexer_topk_num_layers"
        )
    return numbers.reshape(tokens - 1, layers, -1)


def in_pack(
    requests: Sequence[Ints | Tensor], lengths: Sequence[int], cu_seqlens: Tensor, header: Header
) -> Tensor:
    """Return the selections of a pack of requests, as :func:`hand_over` takes them.

    The rows of last tokens, and of padding, are in no recording. They list the keys right before them: no
    token's row sees their outputs, and none of these predicts a token. Other rows that were not recorded,
    such as those of a tool's answer at the end, stay without keys.

    Args:
        requests: of each request ``[rows, layers, topk]``, rows of its first tokens, usually ``length -
            1``; keys counted from its first token, -1 where there is none. Layers are those that select, or
            all of the decoder, of which those that share are left out.
        lengths: tokens of each request, without padding.
        cu_seqlens: ``[documents + 1]``, where requests begin in the whole pack, padding included, before
            context parallel ranks get their rows: ``PackedSeqParams.cu_seqlens_q_padded``, or
            ``cu_seqlens_q``. Documents behind the last request are padding.
        header: of the model.

    Returns:
        ``[tokens, computing layers, topk]`` int32 on the CPU. Layers of multi-token prediction that no
        engine has recorded have no key.

    Raises:
        SelectionError: a request is of another model, longer than its place, or lists what is no token of it.
    """
    bounds = cu_seqlens.tolist()
    if not len(requests) == len(lengths) < len(bounds):
        raise SelectionError(
            f"{REPLAY} batch: {len(requests)} requests, {len(lengths)} lengths and {len(bounds) - 1} "
            "documents of a pack do not belong together; give each request its length, and the pack that "
            "they were put into"
        )
    decoder = [layer for layer in header.computing if layer <= header.layers]
    out = np.full((bounds[-1], len(header.computing), header.topk), -1, np.int32)
    # The first row of each document for which there is nothing to record.
    last = [max(length - 1, 0) for length in lengths] + [0] * (len(bounds) - 1 - len(lengths))
    for (begin, end), first in zip(pairwise(bounds), last, strict=True):
        keys = np.arange(first, end - begin)[:, None] - np.arange(header.topk)  # the most recent ones
        out[begin + first : end, : len(decoder)] = np.maximum(keys, -1)[:, None]
    for number, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        array = request.detach().cpu().numpy() if isinstance(request, Tensor) else request
        begin, end = bounds[number : number + 2]
        rows, layers, topk = array.shape
        problem = None
        if layers == header.layers:
            array = array[:, [layer - 1 for layer in decoder]]
        elif layers not in (len(decoder), len(header.computing)):
            problem = (
                f"{layers} layers, and the model {header.layers}, of which {len(decoder)} select keys; this "
                "is a selection of another model"
            )
        if topk > header.topk:
            problem = problem or (
                f"up to {topk} keys for a row, and the model selects {header.topk}; this is a selection of "
                "another model"
            )
        if not rows <= length <= end - begin:
            problem = problem or (
                f"{rows} rows and {length} tokens, in a document of {end - begin}; give the length that the "
                "recorded tokens have, and where the pack has them"
            )
        if array.size and (array.dtype.kind not in "iu" or array.max() >= length):
            problem = problem or (
                f"{length} tokens and lists {array.dtype} up to {array.max()}; give positions in it, counted "
                "from its first token, as integers"
            )
        if problem is not None:
            raise SelectionError(f"{REPLAY} batch: request {number} has {problem}")
        columns = array.shape[1]
        out[begin : begin + rows, :columns] = -1  # also what an engine with a smaller topk leaves out
        out[begin : begin + rows, :columns, :topk] = np.maximum(array.astype(np.int64), -1)
    return torch.from_numpy(out)


# -- files ---------------------------------------------------------------------------------------


class Handed(NamedTuple):
    """Selections of one sequence that somebody hands over, such as an inference engine.

    Attributes:
        step: from 1.
        sequence: of the step's global batch, from 0.
        array: ``[tokens, computing layers, topk]``, as :meth:`Recording.array` returns it; keys in any order.
        documents: position of the first token of each document, ascending from 0.
    """

    step: int
    sequence: int
    array: npt.NDArray[Any]
    documents: Sequence[int] = (0,)


def write_recording(folder: Path, header: Header, handed: Iterable[Handed]) -> Path:
    """Write selections that somebody hands over as one more file of a recording, and return its path.

    The new file replaces what the others say of the same rows.

    Args:
        folder: the recording's folder; made if need be.
        header: of the model.
        handed: the selections of each sequence.

    Raises:
        RunError: an array is not of this model, or of no integers, or a row lists what it does not see, or a
            key twice; nothing is left of the file then.
    """
    writer = Writer(folder, free_rank(folder), header)
    try:
        for step, sequence, array, documents in handed:
            place = f"step {step}, sequence {sequence}"
            tokens, layers, topk = array.shape
            if layers != len(header.computing) or topk > header.topk:
                raise RunError(
                    f"{place}: selections are [{tokens}, {layers}, {topk}], and the model has "
                    f"{len(header.computing)} layers that select at most {header.topk} keys"
                )
            if array.dtype.kind not in "iu":
                raise RunError(f"{place}: selections are {array.dtype}; hand over positions as integers")
            runs = [Run(a, a, b - a) for a, b in pairwise((*documents, tokens)) if b > a]
            for column, layer in enumerate(header.computing):
                try:
                    writer.append(Key(step, sequence, layer), runs, array[:, column])
                except WrongRows as error:
                    raise RunError(f"{place}, layer {layer}: token {error.row} {error}") from error
    except BaseException:
        writer.path.unlink()
        raise
    finally:
        writer.close()
    return writer.path
