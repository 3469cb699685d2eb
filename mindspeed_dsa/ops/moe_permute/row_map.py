"""Mapping between permuted rows and tokens, used by both permute and unpermute."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Permutation = tuple[Tensor, Tensor | None, Tensor]
"""Permuted tokens ``[rows, hidden]``, permuted probabilities ``[rows]``, packed row map."""


class RowMap(NamedTuple):
    """Int32 tensors that map permuted rows to tokens and experts, and tokens to permuted rows.

    Permuted rows are grouped by expert, and in token order within each expert. Megatron has room for one
    tensor per permutation, so callers store :meth:`pack`'s result.
    """

    offsets: Tensor | None
    """``[tokens + 1]``: token ``t`` owns the entries ``offsets[t] .. offsets[t + 1]`` of :attr:`rows`. None:
    all tokens own the same number of entries."""
    rows: Tensor
    """``[rows]``: permuted rows, grouped by token, in ascending order for each token."""
    tokens: Tensor
    """``[rows]``: token of each permuted row, or -1."""
    experts: Tensor
    """``[rows]``: expert of each permuted row, or -1."""

    def pack(self) -> Tensor:
        """Concatenate the map's tensors into one tensor, for :func:`unpack`."""
        return torch.cat([part for part in self if part is not None])  # [(tokens + 1 or 0) + 3 * rows]

    def starts(self, tokens: int) -> Tensor:
        """Return :attr:`offsets`, or compute them if they are None."""
        if self.offsets is not None:
            return self.offsets
        return torch.arange(tokens + 1, dtype=torch.int32, device=self.rows.device) * (
            len(self.rows) // max(tokens, 1)
        )

    def slots(self, experts: int) -> Tensor:
        """Return ``[rows]`` int32: position of each permuted row in a flattened ``[tokens, experts]``."""
        return self.tokens * experts + self.experts


def unpack(packed: Tensor, tokens: int, rows: int) -> RowMap:
    """Return the row map that :meth:`RowMap.pack` packed; its tensors are views of ``packed``.

    Args:
        packed: result of :meth:`RowMap.pack`.
        tokens: number of tokens.
        rows: number of permuted rows.

    Raises:
        ValueError: the sizes do not fit.
    """
    bounds = len(packed) - 3 * rows
    if bounds not in (0, tokens + 1):
        raise ValueError(
            f"moe_permute: a row map of {len(packed)} numbers is not that of {tokens} tokens in {rows} rows; "
            "pass the one that permute returned with them"
        )
    offsets = packed[:bounds] if bounds else None
    return RowMap(offsets, *packed[bounds:].view(3, rows).unbind(0))  # [rows] each


def unpack_for(
    packed: Tensor, routing_map: Tensor, grad_permuted: Tensor | None, grad_probs: Tensor | None
) -> RowMap:
    """Call :func:`unpack` with the number of rows of whichever gradient is not None."""
    grad = grad_permuted if grad_permuted is not None else grad_probs
    assert grad is not None
    return unpack(packed, len(routing_map), len(grad))


def of_routing(routing_map: Tensor, rows: int | None) -> RowMap:
    """Build the row map of a routing in plain PyTorch; synchronizes with the device if ``rows`` is None.

    Args:
        routing_map: ``[tokens, experts]`` bool.
        rows: caller's count of its True entries, or None.

    Raises:
        ValueError: the map is on a CPU, and the caller's count is wrong.
    """
    if rows is not None and routing_map.device.type != "cpu":
        return of_counted_routing(routing_map, rows)
    tokens, experts = routing_map.shape
    slots = routing_map.reshape(-1).nonzero().view(-1)  # [rows], token by token
    if rows is not None and rows != len(slots):
        raise ValueError(
            f"moe_permute: the routing map sends its {tokens} tokens to {len(slots)} rows in all, and the "
            f"caller says {rows}; num_out_tokens must count the entries of the map"
        )
    by_token = slots // max(experts, 1)
    expert = slots - by_token * experts
    # int16 keys make the sort faster. A stable sort keeps the token order of an expert's rows.
    order = (expert.to(torch.int16) if experts < 1 << 15 else expert).argsort(stable=True)  # [rows]
    place = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    first = torch.arange(tokens + 1, device=slots.device)
    return RowMap(
        torch.searchsorted(by_token, first, out_int32=True),
        torch.empty_like(place).index_copy_(0, order, place),  # inverse of `order`
        by_token.index_select(0, order).int(),  # [rows]
        expert.index_select(0, order).int(),  # [rows]
    )


def of_counted_routing(routing_map: Tensor, rows: int) -> RowMap:
    """Build the row map of a routing with sums and scatters of int32, without a device synchronization.

    Args:
        routing_map: ``[tokens, experts]`` bool.
        rows: number of its True entries. With a wrong number, rows are missing or have arbitrary tokens and
            experts.
    """
    (tokens, experts), device = routing_map.shape, routing_map.device
    entries = routing_map.int()
    of_expert, of_token = (entries.sum(dim, dtype=torch.int32) for dim in (0, 1))
    # Inclusive count of the entries up to each position: expert by expert, and token by token. [tokens,
    # experts]
    by_expert = entries.cumsum(0, dtype=torch.int32) + _begins(of_expert)
    by_token = entries.cumsum(1, dtype=torch.int32) + _begins(of_token)[:, None]
    token = torch.arange(tokens, dtype=torch.int32, device=device)[:, None]
    expert = torch.arange(experts, dtype=torch.int32, device=device)

    def of_entries(values: Tensor, up_to: Tensor, position: Tensor) -> Tensor:
        # Positions without an entry are scattered behind the rows, each to its own place: no size depends on
        # the map.
        place = torch.where(routing_map, up_to - 1, rows + position - up_to)
        scattered = torch.zeros(rows + routing_map.numel(), dtype=torch.int32, device=device)
        return scattered.index_copy_(0, place.reshape(-1).long(), values.reshape(-1))[:rows]  # [rows]

    offsets = torch.zeros(tokens + 1, dtype=torch.int32, device=device)
    offsets[1:] = of_token.cumsum(0, dtype=torch.int32)
    return RowMap(
        offsets,
        of_entries(by_expert - 1, by_token, token * experts + expert),
        of_entries(token.expand(-1, experts), by_expert, expert * tokens + token),
        group_of_rows(of_expert, rows).clamp_(max=max(experts - 1, 0)),
    )


def chunk_rows(split_sizes: Tensor, order: Tensor, rows: int) -> Tensor:
    """Return the source row of each row when chunks are reordered, without a device synchronization.

    Args:
        split_sizes: ``[chunks]``, rows of each chunk; their sum is ``rows``.
        order: ``[chunks]``, permutation: ``order[i]`` is the chunk that becomes chunk ``i``.
        rows: number of rows.

    Returns:
        ``[rows]`` int64, row of the input for each row of the output.
    """
    split_sizes = split_sizes.to(torch.int32)
    sizes = split_sizes.index_select(0, order)  # [chunks], in the new order
    # Start of each chunk in the input, minus its start in the output.
    shift = _begins(split_sizes).index_select(0, order) - _begins(sizes)  # [chunks]
    row = torch.arange(rows, device=split_sizes.device)  # [rows]
    return row + shift.index_select(0, group_of_rows(sizes, rows))


def group_of_rows(sizes: Tensor, rows: int) -> Tensor:
    """Return the group of each row, given the sizes of consecutive groups; without synchronizing.

    Args:
        sizes: ``[groups]`` int32, whose sum is ``rows``.
        rows: number of rows.

    Returns:
        ``[rows]`` int32.
    """
    # Sums and a scatter of int32: Ascend devices run searches and int64 sums on their few processor cores.
    ends = sizes.cumsum(0, dtype=torch.int32)
    # A row's group is the number of groups that end at or before it.
    ended = torch.zeros(rows + 1, dtype=torch.int32, device=sizes.device)
    ended.scatter_add_(0, ends.clamp(max=rows).long(), torch.ones_like(ends))
    return ended[:rows].cumsum(0, dtype=torch.int32)


def _begins(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0, dtype=torch.int32) - sizes
