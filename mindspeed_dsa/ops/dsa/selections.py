"""Lists of keys made of selections: with a window of recent keys, and of the keys of selected pools."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed_dsa.ops.checks import check_shape, enabled, require
from mindspeed_dsa.ops.row_ranges import Ranges, RowForm, form_of, visible_ranges

# Entries of the list that are put in order at a time; they take several int64 each.
_ENTRIES = 4 << 20


def with_window(
    topk_indices: Tensor,
    window: int,
    keys: int,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    form: RowForm | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return each row's selected keys and its last ``window`` visible keys, each key once.

    The result is another selection: attention and losses take it in place of ``topk_indices``, and without
    ``topk_scores`` the loss computes the scores of all its keys.

    Args:
        topk_indices: ``[batch, rows, topk]`` int32 or int64, -1 at the tail.
        window: number of keys, at least 1; rows that see fewer keys list all of them.
        keys: number of keys per sequence.
        starts: first visible key of each row, as for
            :func:`mindspeed_dsa.ops.lightning_indexer.lightning_indexer`.
        ends: one past the last visible key of each row; default: causal, with as many keys as rows.
        form: replacement for ``starts`` and ``ends``.
        cu_seqlens: replacement for ``starts``, ``ends`` and ``form``.

    Returns:
        ``[batch, rows, topk + window]`` int32, -1 at the tail: selected keys before the window in their
        order, then the window, ascending.

    Raises:
        ValueError: a shape or range does not fit.

    Source: DeepSeek-V4 report (sliding window branch).
    """
    operator = "with_window"
    require(window >= 1, operator, f"window must be at least 1, got {window}")
    ranges = _ranges(operator, topk_indices, keys, starts, ends, form, cu_seqlens)

    def listed(selected: Tensor, first: Tensor, end: Tensor) -> Tensor:
        low = torch.maximum(first, end - window)  # [n, 1]
        recent = low + torch.arange(window, dtype=torch.int32, device=low.device)  # [n, window]
        older = selected.masked_fill((selected >= low) & (selected < end), -1)  # [n, topk]
        return torch.cat([older.to(torch.int32), recent.masked_fill(recent >= end, -1)], dim=-1)

    return _keys_first(topk_indices, ranges, topk_indices.shape[2] + window, listed)


def keys_of_pools(
    pool_indices: Tensor,
    pool: int,
    keys: int,
    *,
    with_tail: bool = False,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    form: RowForm | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return the keys of selected pools: pool ``i`` has the keys ``i * pool .. i * pool + pool - 1``.

    To select among complete pools, pass one key per pool, such as a mean, to
    :func:`mindspeed_dsa.ops.lightning_indexer.lightning_indexer`, with ``ends // pool`` as its ``ends``.

    Args:
        pool_indices: ``[batch, rows, topk]`` int32 or int64 numbers of pools, -1 at the tail.
        pool: number of keys of a pool, at least 1.
        keys: number of keys per sequence.
        with_tail: whether rows also list the keys after the last pool that they see completely, once even
            if their pool is selected.
        starts: first visible key of each row; invisible keys are not listed. With a tail they are multiples
            of ``pool``, or an error: on accelerators only with debug checks on
            (:func:`mindspeed_dsa.ops.checks.set_debug_checks`).
        ends: one past the last visible key of each row; default: causal, with as many keys as rows.
        form: replacement for ``starts`` and ``ends``.
        cu_seqlens: replacement for ``starts``, ``ends`` and ``form``.

    Returns:
        ``[batch, rows, topk * pool]`` int32, -1 at the tail: the keys of the pools in their order. With a
        tail ``[batch, rows, topk * pool + pool - 1]``, its keys last.

    Raises:
        ValueError: a shape or range does not fit.
    """
    operator = "keys_of_pools"
    require(pool >= 1, operator, f"pool must be at least 1, got {pool}")
    ranges = _ranges(operator, pool_indices, keys, starts, ends, form, cu_seqlens)
    require(
        not with_tail or _start_with_pools(ranges, pool),
        operator,
        f"with a tail, starts must be multiples of pool = {pool}: keys before a row's first whole pool would "
        "be in no list; pad packed sequences to whole pools",
    )

    def listed(selected: Tensor, first: Tensor, end: Tensor) -> Tensor:
        place = torch.arange(pool, dtype=torch.int32, device=first.device)
        of_pools = (selected.to(torch.int32)[..., None] * pool + place).flatten(1)  # [n, topk * pool]
        chosen = (selected >= 0).repeat_interleave(pool, dim=1)
        after = torch.maximum(first, end - end % pool) if with_tail else end  # [n, 1]
        lists = [of_pools.masked_fill(~chosen | (of_pools < first) | (of_pools >= after), -1)]
        if with_tail:
            tail = after + place[:-1]  # [n, pool - 1]
            lists.append(tail.masked_fill(tail >= end, -1))
        return torch.cat(lists, dim=-1)

    width = pool_indices.shape[2] * pool + (pool - 1 if with_tail else 0)
    return _keys_first(pool_indices, ranges, width, listed)


def _start_with_pools(ranges: Ranges, pool: int) -> bool:
    """Return whether every row's keys start with a pool; True if only an accelerator knows."""
    if ranges.form is not None and ranges.form.sequences is not None:
        start, rows = 0, ranges.starts.shape[1]
        for length in ranges.form.sequences:
            if start % pool:
                return False
            start = (start + length) % rows
        return True
    read = enabled() or ranges.starts.device.type == "cpu"
    return not read or not bool((ranges.starts % pool).any())


def _ranges(
    operator: str,
    indices: Tensor,
    keys: int,
    starts: Tensor | None,
    ends: Tensor | None,
    form: RowForm | None,
    cu_seqlens: Tensor | None,
) -> Ranges:
    check_shape(operator, "indices", indices, (None,) * 3, "[batch, rows, topk]")
    require(
        indices.dtype in (torch.int32, torch.int64),
        operator,
        f"indices must be int32 or int64, got {indices.dtype}",
    )
    batch, rows = indices.shape[:2]
    form = form_of(operator, cu_seqlens, form, batch, rows, keys, starts, ends)
    return visible_ranges(operator, batch, rows, keys, starts, ends, indices.device, form)


def _keys_first(
    indices: Tensor, ranges: Ranges, width: int, listed: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Return ``listed(indices, starts, ends)`` of some rows at a time, with entries of -1 moved to the tail.

    ``listed`` gets ``[n, topk]``, ``[n, 1]`` and ``[n, 1]``, and returns ``[n, width]`` int32.
    """
    result = torch.full((*indices.shape[:2], width), -1, dtype=torch.int32, device=indices.device)
    rows = max(1, _ENTRIES // max(width, 1))
    tensors = (indices, ranges.starts[..., None], ranges.ends[..., None], result)
    # Rows of all sequences form one axis.
    for *arguments, part in zip(*(x.flatten(0, 1).split(rows) for x in tensors), strict=True):
        entries = listed(*arguments)
        named = entries >= 0
        # A key's place is the number of keys before it. Entries without a key write their -1 behind the end.
        places = named.cumsum(dim=-1).sub_(1).masked_fill_(~named, width)
        row = entries.new_full((len(entries), width + 1), -1).scatter_(1, places, entries)
        part.copy_(row[:, :width])
    return result
