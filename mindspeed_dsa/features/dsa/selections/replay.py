"""Replay of selections, from a recording or from arrays that the job passes with each batch.

An inference engine records a request with one row of keys per token that it has processed, hence none for the
last generated token. A training step packs several requests. Each request is padded to the multiple that the
layout requires, and the pack can have padding at its end.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
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
from mindspeed_dsa.megatron.selection_source import Chosen, LayerRows, SelectionSource, current
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.runs.files import RunError


class SelectionError(MindSpeedDSAError):
    """Error for a selection that cannot be replayed. The message names the token and a fix."""


# -- sources -------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Keys that a source has for some query tokens.

    Attributes:
        keys: selected keys ``[rows, width]``, relative to the document's start, unordered, negative for no
            key.
        has: mask of the query tokens for which the source has keys, ``[rows]``.
        documents: start of each token's document in the recording, ``[rows]``; None: as in the batch.
    """

    keys: npt.NDArray[Any]
    has: npt.NDArray[np.bool_]
    documents: Ints | None = None

    @classmethod
    def nothing(cls, rows: int) -> Found:
        """Return the result of a source that has no keys for ``rows`` query tokens."""
        return cls(np.full((rows, 0), -1, np.int32), np.zeros(rows, np.bool_))


class _Replay(SelectionSource, ABC):
    """Base of sources that check each selection. ``missing``: :data:`REFUSE` or :data:`SELECT`."""

    def __init__(self, missing: str) -> None:
        self._missing = missing

    @abstractmethod
    def found(self, rows: LayerRows, sequence: int, positions: Ints, at: Longs) -> Found:
        """Return the keys that the source has for a sequence of the microbatch.

        Args:
            rows: description of the layer's query tokens on this rank.
            sequence: index of the sequence in the microbatch.
            positions: position of each query token in the sequence.
            at: index of each query token on this rank.
        """

    @abstractmethod
    def place(self, rows: LayerRows, sequence: int) -> str:
        """Return the name of a sequence and layer, for messages."""

    def choose(self, rows: LayerRows) -> Chosen:
        """Return the keys of a layer's query tokens, on the host, ascending.

        Raises:
            SelectionError: keys are invalid or of other documents, or are missing although ``missing`` is
                :data:`REFUSE`.
        """
        self.asked = True
        # [runs, 4]: first row, end row, first key, end of the keys. Padding runs are left out.
        runs = np.array([run for run in rows.find_runs() if run.high > run.low], np.int32).reshape(-1, 4)
        counts = runs[:, 1] - runs[:, 0]
        # Offset of each row within its run: counts 2, 3 -> 0 1 0 1 2.
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        local_rows, low = np.repeat(runs[:, 0], counts) + within, np.repeat(runs[:, 2], counts)
        positions = (np.repeat(runs[:, 3] - counts, counts) + within).astype(np.int32)
        visible, width = positions - low + 1, min(rows.topk, rows.keys)
        out = np.full((rows.batch, rows.rows, width), -1, np.int32)
        missing = np.zeros((rows.batch, rows.rows), np.bool_)
        for sequence in range(rows.batch):
            selection = self.found(rows, sequence, positions, local_rows)
            keys = self._checked(selection, rows, sequence, positions, low)
            listed = np.count_nonzero(keys >= 0, axis=1)
            needed = np.minimum(visible, rows.topk)
            lacks = ~selection.has | (listed < needed)
            if lacks.any() and self._missing == REFUSE:
                row = int(lacks.argmax())
                what = "has no selection"
                if selection.has[row]:
                    what = f"has {listed[row]} keys, and {needed[row]} of the {visible[row]} it sees are used"
                raise SelectionError(
                    f"{self.place(rows, sequence)}: row {positions[row]} {what}; record all that is "
                    f"replayed, or let the indexer select there by --dsa-replay-missing {SELECT}"
                )
            out[sequence, local_rows] = np.where(keys >= 0, keys + low[:, None], -1)  # in the sequence
            missing[sequence, local_rows] = lacks
        return Chosen((torch.from_numpy(out),), missing=torch.from_numpy(missing) if missing.any() else None)

    def _checked(self, found: Found, rows: LayerRows, sequence: int, positions: Ints, low: Ints) -> Ints:
        """Check keys; return them ascending with -1 at the tail, ``[rows, min(topk, keys)]``."""
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
    """Source that reads one microbatch's selections from a recording.

    Args:
        recording: recording to replay.
        step: number of the step.
        place: index of the microbatch in the step's global batch.
        missing: action for query tokens without keys; see :class:`_Replay`.
    """

    def __init__(self, recording: Recording, step: int, place: int, missing: str) -> None:
        super().__init__(missing)
        self._recording, self._step, self._place = recording, step, place
        self._tokens: npt.NDArray[np.int64] | None = None

    def _key(self, rows: LayerRows, sequence: int) -> Key:
        return Key(self._step, self._place * rows.batch + sequence, rows.layer)

    def place(self, rows: LayerRows, sequence: int) -> str:
        """Return the name of step, sequence and layer, for messages."""
        step, number, layer = self._key(rows, sequence)
        return f"{REPLAY} {self._recording.folder}: step {step}, sequence {number}, layer {layer}"

    def found(self, rows: LayerRows, sequence: int, positions: Ints, at: Longs) -> Found:
        """Return keys from the recording; see :meth:`_Replay.found`."""
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
        # Find the record's row of each position by binary search. Clipped misses fail the comparison below.
        order = np.argsort(recorded.positions, kind="stable")
        sorted_positions = recorded.positions[order]
        place = np.searchsorted(sorted_positions, positions).clip(max=len(order) - 1)
        has = sorted_positions[place] == positions
        matches = order[place]
        if recorded.tokens is not None and rows.tokens is not None:
            if self._tokens is None:
                self._tokens = rows.tokens.cpu().numpy()
            # Recordings keep the low 16 bits of tokens.
            others = has & (recorded.tokens[matches] != (self._tokens[sequence, at] & 0xFFFF))
            if others.any():
                raise SelectionError(
                    f"{self.place(rows, sequence)}: row {positions[others.argmax()]} has another token than "
                    "it had when its selection was made; replay it with the same data in the same order"
                )
        keys = np.where(has[:, None], recorded.keys[matches], -1)
        return Found(keys, has, recorded.documents[matches])


class HandedOver(_Replay):
    """Source of selections that the job passes with a microbatch.

    Args:
        header: header of the model.
        missing: action for query tokens without keys; see :class:`_Replay`.
    """

    def __init__(self, header: Header, missing: str) -> None:
        super().__init__(missing)
        self.header = header
        self._array: Tensor | None = None

    def give(self, topk_indices: Tensor) -> None:
        """Set the microbatch's selections; see :func:`hand_over`."""
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
        """Return the name of sequence and layer, for messages."""
        return f"{REPLAY} batch: sequence {sequence} of the microbatch, layer {rows.layer}"

    def found(self, rows: LayerRows, sequence: int, positions: Ints, at: Longs) -> Found:
        """Return keys passed by the job; see :meth:`_Replay.found`."""
        array = self._array
        if array is None:
            return Found.nothing(len(positions))
        if array.dim() == 3:
            if array.shape[0] % rows.batch:
                raise SelectionError(
                    f"{self.place(rows, sequence)}: {array.shape[0]} tokens were handed over, which are not "
                    f"those of {rows.batch} sequences; hand over [batch, tokens, layers, topk]"
                )
            array = array.unflatten(0, (rows.batch, -1))  # [batch, tokens, layers, topk]
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
        token_index = torch.from_numpy(positions.clip(max=tokens - 1)).to(of_layer.device)
        keys = of_layer.index_select(0, token_index.long()).cpu().numpy()
        has = (positions < tokens) & (keys >= 0).any(axis=1)
        return Found(np.where(has[:, None], keys, -1), has)


# -- selections passed by the job ----------------------------------------------------------------


def hand_over(topk_indices: Tensor) -> None:
    """Set the selections for this microbatch's forward.

    Call this in the job's ``forward_step``, on every rank, before the model. Every rank passes the keys of
    the whole microbatch, for all layers and tokens. Under context, tensor and pipeline parallelism, each rank
    uses its own part.

    Args:
        topk_indices: selected keys ``[tokens, computing layers, topk]`` with sequences concatenated, or
            ``[batch, tokens, computing layers, topk]``, of any integer type, on any device. Only layers that
            select keys are included; multi-token prediction layers are last. Keys are relative to the
            document's first token, unordered, -1 for no key.

    Raises:
        SelectionError: the shape or dtype is wrong, or ``--dsa-replay-selections batch`` is not set.
    """
    _waiting().give(topk_indices)


def _waiting() -> HandedOver:
    """Return the current microbatch's source, to which the job passes selections."""
    microbatch = current().microbatch
    if microbatch is None or not isinstance(microbatch.source, HandedOver):
        raise SelectionError(
            f"selections were handed over outside of a microbatch's forward, or without {REPLAY} batch; call "
            "it in the function that Megatron's schedule calls for each microbatch"
        )
    return microbatch.source


def hand_over_requests(requests: Sequence[Ints | Tensor], lengths: Sequence[int], cu_seqlens: Tensor) -> None:
    """Set the selections for a microbatch that is a pack of requests; see :func:`hand_over`.

    Args:
        requests: selections of each request; see :func:`in_pack` for this argument and the next two.
        lengths: number of tokens of each request.
        cu_seqlens: start of each request in the pack.

    Raises:
        SelectionError: the arguments do not fit together, or ``--dsa-replay-selections batch`` is not set.
    """
    hand_over(in_pack(requests, lengths, cu_seqlens, _waiting().header))


def decode(encoded: str | bytes, tokens: int, layers: int) -> Ints:
    """Decode a request's selections, as returned by SGLang in ``meta_info["indexer_topk"]``.

    Args:
        encoded: base64 of int32 numbers.
        tokens: number of tokens of the request, prompt and response. All tokens but the last have selections.
        layers: value of ``meta_info["indexer_topk_num_layers"]``.

    Returns:
        Selected keys ``[tokens - 1, layers, topk]`` int32.

    Raises:
        SelectionError: the length does not match.
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
    """Convert the selections of several requests to the array for a pack, as in :func:`hand_over`.

    The last token of a request and padding are never recorded. They get the most recent keys, which has no
    effect: no other token attends to them, and they have no loss. Other tokens without a record, such as a
    tool's answer at the end, get no keys.

    Args:
        requests: selections of each request, ``[rows, layers, topk]``, for its first tokens, usually ``length
            - 1``. Keys are relative to the request's first token, -1 for no key. Layers are the computing
            layers, or all decoder layers; layers that share a selection are then dropped.
        lengths: number of tokens of each request, without padding.
        cu_seqlens: start of each document in the whole pack with padding, ``[documents + 1]``, before context
            parallel ranks take their tokens (``PackedSeqParams.cu_seqlens_q_padded`` or ``cu_seqlens_q``).
            Documents after the last request are padding.
        header: header of the model.

    Returns:
        Selected keys ``[tokens, computing layers, topk]`` int32 on the CPU. Multi-token prediction layers
        that the requests lack have no keys.

    Raises:
        SelectionError: a request has other layers than the model, is too long for its document, or has keys
            beyond it.
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
    # First row of each document that has no record: the last token, or all rows of a padding document.
    last = [max(length - 1, 0) for length in lengths] + [0] * (len(bounds) - 1 - len(lengths))
    for (begin, end), first in zip(pairwise(bounds), last, strict=True):
        keys = np.arange(first, end - begin)[:, None] - np.arange(header.topk)  # most recent first
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
        out[begin : begin + rows, :columns] = -1  # also where the engine's topk is smaller
        out[begin : begin + rows, :columns, :topk] = np.maximum(array.astype(np.int64), -1)
    return torch.from_numpy(out)


# -- files ---------------------------------------------------------------------------------------


class Handed(NamedTuple):
    """Selections of one sequence, for example from an inference engine.

    Attributes:
        step: step number, from 1.
        sequence: index in the step's global batch, from 0.
        array: selected keys ``[tokens, computing layers, topk]`` as in :meth:`Recording.array`, unordered.
        documents: position of each document's first token, ascending from 0.
    """

    step: int
    sequence: int
    array: npt.NDArray[Any]
    documents: Sequence[int] = (0,)


def write_recording(folder: Path, header: Header, handed: Iterable[Handed]) -> Path:
    """Write selections as an additional file of a recording; return the file's path.

    The new file overrides records of the same tokens in other files.

    Args:
        folder: folder of the recording, created if missing.
        header: header of the model.
        handed: selections of each sequence.

    Raises:
        RunError: an array does not fit the model or has no integers, or a token has a key twice or a key that
            it cannot see. The file is then removed.
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
