"""Selections of a rollout's requests, as the pack that a training step runs them in.

An inference engine records a request: a row for each token that it has read, so none for the last one that
it has generated. A training step packs several requests, each padded to a multiple that its layout wants,
and may have padding of its own behind them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mindspeed_dsa.features.dsa.recorded_selections.feature import REPLAY
from mindspeed_dsa.features.dsa.recorded_selections.replay import SelectionError, hand_over, waiting_header
from mindspeed_dsa.runs.selections import Header

Array = npt.NDArray[np.int32]


def decode(encoded: str | bytes, tokens: int, layers: int) -> Array:
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
    requests: Sequence[Array | Tensor], lengths: Sequence[int], cu_seqlens: Tensor, header: Header
) -> Tensor:
    """Return the selections of a pack of requests, as :func:`.replay.hand_over` takes them.

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
        out[begin + first : end, : len(decoder)] = _most_recent(first, end - begin, header.topk)[:, None]
    for number, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        array = request.detach().cpu().numpy() if isinstance(request, Tensor) else request
        begin, end = bounds[number : number + 2]
        rows, layers, topk = array.shape
        if layers == header.layers:
            array = array[:, [layer - 1 for layer in decoder]]
        elif layers not in (len(decoder), len(header.computing)):
            raise SelectionError(
                f"{REPLAY} batch: request {number} has {layers} layers, and the model {header.layers}, of "
                f"which {len(decoder)} select keys; this is a selection of another model"
            )
        if topk > header.topk:
            raise SelectionError(
                f"{REPLAY} batch: request {number} has up to {topk} keys for a row, and the model selects "
                f"{header.topk}; this is a selection of another model"
            )
        if not rows <= length <= end - begin:
            raise SelectionError(
                f"{REPLAY} batch: request {number} has {rows} rows and {length} tokens, in a document of "
                f"{end - begin}; give the length that the recorded tokens have, and where the pack has them"
            )
        if array.size and (array.dtype.kind not in "iu" or array.max() >= length):
            raise SelectionError(
                f"{REPLAY} batch: request {number} has {length} tokens and lists {array.dtype} up to "
                f"{array.max()}; give positions in it, counted from its first token, as integers"
            )
        columns = array.shape[1]
        out[begin : begin + rows, :columns] = -1  # also what an engine with a smaller topk leaves out
        out[begin : begin + rows, :columns, :topk] = np.maximum(array.astype(np.int64), -1)
    return torch.from_numpy(out)


def _most_recent(first: int, end: int, topk: int) -> Array:
    """Return for each row the ``topk`` last keys up to itself, ``[rows, topk]``, -1 where there are fewer."""
    keys = np.arange(first, end, dtype=np.int32)[:, None] - np.arange(topk, dtype=np.int32)
    return np.maximum(keys, -1)


def hand_over_requests(
    requests: Sequence[Array | Tensor], lengths: Sequence[int], cu_seqlens: Tensor
) -> None:
    """Give the keys of a microbatch that is a pack of requests, as :func:`.replay.hand_over` does.

    Args:
        requests: as of :func:`in_pack`, and so are the next two.
        lengths: tokens of each request.
        cu_seqlens: where they begin.

    Raises:
        SelectionError: they do not fit, or ``--dsa-replay-selections batch`` is not on.
    """
    hand_over(in_pack(requests, lengths, cu_seqlens, waiting_header()))
