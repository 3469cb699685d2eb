"""Scores of all rows and the selection from them in one launch, in Triton.

Programs draw their tasks from a counter, in an order in which none waits for a later one: the scores of a
group of rows, those of the next group, the selection from the first, and so on. So some programs select while
others multiply, on the same multiprocessors, and scores lie in a ring of groups that is about as large as a
second-level cache. What is computed, and in which order, is what ``triton.py`` beside this file computes by
two launches for each slab: the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_dsa.ops.lightning_indexer.triton_kernels import score_block
from mindspeed_dsa.ops.lightning_indexer.triton_selection import select_row, selection_constants
from mindspeed_dsa.ops.row_ranges import Ranges
from mindspeed_dsa.ops.triton.common import block, dense_rows, widen
from mindspeed_dsa.ops.triton.launch import on_grid

MEASURED_KEYS = 0
"""Most keys with which one launch was measured to be no slower than two for each slab: it was not timed."""
# Groups whose scores are held at once: one is scored, one selected from, one is between the two.
_RING = 3
# Programs that are to find scores to form while others select: two for each multiprocessor of an H100.
_PROGRAMS = 264
_RING_BYTES = 256 << 20
_wanted: ContextVar[bool | None] = ContextVar("_wanted", default=None)


class Scored(NamedTuple):
    """Operands of scores.

    Attributes:
        query: ``[batch, rows, heads, head_dim]``.
        key: ``[batch, key_length, head_dim]``.
        weights: ``[batch, rows, heads]``.
        factors: ``[batch, key_length]`` fp32, by which scores are multiplied; None for none.
    """

    query: Tensor
    key: Tensor
    weights: Tensor
    factors: Tensor | None = None


@contextmanager
def one_launch(wanted: bool) -> Iterator[None]:
    """Selections inside take one launch, or two for each slab, whatever was measured."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def takes_one_launch(key_length: int) -> bool:
    """Return whether a selection among so many keys takes one launch."""
    wanted = _wanted.get()
    return key_length > 0 and (key_length <= MEASURED_KEYS if wanted is None else wanted)


@triton.jit
def wait_until(counter, wanted):
    """Wait until other programs have counted so far, and see what they wrote before they did."""
    while tl.atomic_add(counter, 0, sem="acquire") < wanted:
        pass
    tl.debug_barrier()


@triton.jit
def count_one(counter):
    """Count this program, all of whose threads have written what they do."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit(do_not_specialize=["group_rows", "of_sequence", "groups"])
def score_and_select_kernel(
    query,
    key,
    weights,
    factors,
    starts,
    ends,
    slab,
    listed_indices,
    listed_scores,
    topk_indices,
    topk_scores,
    counters,
    rows,
    key_length,
    topk,
    group_rows,
    of_sequence,
    groups,
    query_batch,
    query_row,
    query_head,
    key_batch,
    key_row,
    weight_batch,
    weight_row,
    weight_head,
    RING: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    USE_RELU: tl.constexpr,
    WIDEN: tl.constexpr,
    LIST: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per task: the scores of a block of rows with a tile of keys, or the selection of a row.

    ``groups`` groups of ``group_rows`` rows, ``of_sequence`` for each sequence, the last of them first: where
    rows see what is before them, the least work comes at the end. ``counters`` are the tasks that were taken,
    and for each group its scores' that are done, and its rows that have selected. ``slab`` and the lists hold
    ``RING`` groups.
    """
    tiles = tl.cdiv(key_length, BLOCK_N)
    tasks = tl.cdiv(group_rows, BLOCK_Q) * tiles
    # Programs need not begin in order, so that their number would not do.
    ticket = tl.atomic_add(counters, 1)
    behind = tl.maximum(ticket - tasks, 0)
    turn = tl.where(ticket < tasks, 0, 1 + behind // (tasks + group_rows))
    within = tl.where(ticket < tasks, ticket, behind % (tasks + group_rows))
    # Behind the last group's scores only selections are left.
    within += tl.where(turn == groups, tasks, 0)
    group = turn - (within >= tasks).to(tl.int32)
    sequence = (groups - 1 - group) // of_sequence
    first = (groups - 1 - group) % of_sequence * group_rows
    here = tl.minimum(rows - first, group_rows)
    place = (group % RING).to(tl.int64) * group_rows
    batch = sequence.to(tl.int64)
    row_of_all = batch * rows + first
    scored = counters + 1 + group
    selected = counters + 1 + groups + group
    if within < tasks:
        if group >= RING:
            wait_until(selected - RING, group_rows)
        own_factors = factors
        if factors is not None:
            own_factors = factors + batch * key_length
        score_block(
            query + batch * query_batch + first.to(tl.int64) * query_row,
            key + batch * key_batch,
            weights + batch * weight_batch + first.to(tl.int64) * weight_row,
            own_factors,
            starts + row_of_all,
            ends + row_of_all,
            slab + place * key_length,
            here,
            key_length,
            within // tiles * BLOCK_Q,
            within % tiles * BLOCK_N,
            query_row,
            query_head,
            key_row,
            weight_row,
            weight_head,
            HEADS,
            DIM,
            BLOCK_J,
            BLOCK_D,
            BLOCK_N,
            BLOCK_Q,
            USE_RELU,
            WIDEN,
        )
        count_one(scored)
    else:
        row = within - tasks
        if row < here:
            wait_until(scored, tasks)
            select_row(
                slab + (place + row) * key_length,
                listed_indices + (place + row) * LIST,
                listed_scores + (place + row) * LIST,
                topk_indices + (row_of_all + row) * topk,
                topk_scores + (row_of_all + row) * topk,
                tl.load(starts + row_of_all + row),
                tl.load(ends + row_of_all + row),
                key_length,
                topk,
                LIST,
                SAMPLE,
                BLOCK,
            )
        count_one(selected)


def select_at_once(
    scored: Scored, topk: int, ranges: Ranges, use_relu: bool, tiles: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return indices and scores of the selected keys, ``[batch, rows, topk]`` each.

    Args:
        scored: what scores are formed of; neither it nor the result is empty.
        topk: entries per row.
        ranges: the keys that each row sees.
        use_relu: whether the product of each head is clamped at zero.
        tiles: of :func:`score_block`, and options of the launch.
    """
    query, key, weights = dense_rows(scored.query), dense_rows(scored.key), scored.weights
    (batch, rows, heads, dim), key_length, device = query.shape, key.shape[1], query.device
    constants = selection_constants(topk)
    group, length = group_rows(rows, key_length, tiles, constants["LIST"]), constants["LIST"]
    of_sequence = triton.cdiv(rows, group)
    groups = batch * of_sequence
    tasks = triton.cdiv(group, tiles["BLOCK_Q"]) * triton.cdiv(key_length, tiles["BLOCK_N"])
    held = min(_RING, groups) * group
    topk_indices = torch.empty(batch, rows, topk, dtype=torch.int32, device=device)
    topk_scores = torch.empty(batch, rows, topk, dtype=torch.float32, device=device)
    on_grid(score_and_select_kernel, groups * (tasks + group))(
        query,
        key,
        weights,
        scored.factors,
        ranges.starts.contiguous(),
        ranges.ends.contiguous(),
        torch.empty(held, key_length, dtype=torch.float32, device=device),
        torch.empty(held, length, dtype=torch.int32, device=device),
        torch.empty(held, length, dtype=torch.float32, device=device),
        topk_indices,
        topk_scores,
        torch.zeros(1 + 2 * groups, dtype=torch.int32, device=device),
        rows,
        key_length,
        topk,
        group,
        of_sequence,
        groups,
        *query.stride()[:3],
        *key.stride()[:2],
        *weights.stride(),
        RING=_RING,
        HEADS=heads,
        DIM=dim,
        BLOCK_D=block(dim),
        USE_RELU=use_relu,
        WIDEN=widen(query),
        **tiles,
        **constants,
    )
    return topk_indices, topk_scores


def group_rows(rows: int, key_length: int, tiles: dict[str, Any], length: int) -> int:
    """Return how many rows are scored before one of them selects.

    So many that their scores occupy a whole GPU, and that a ring of them stays within its bytes.

    Args:
        rows: of a sequence.
        key_length: of a sequence, at least 1.
        tiles: of :func:`score_block`.
        length: entries of a row's list.
    """
    blocks = triton.cdiv(_PROGRAMS, triton.cdiv(key_length, tiles["BLOCK_N"]))
    most = _RING_BYTES // (_RING * (4 * key_length + 8 * length))
    return max(1, min(rows, blocks * int(tiles["BLOCK_Q"]), most))
