"""Which permuted row belongs to which token: the integers that a permutation and its reverse share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Permutation = tuple[Tensor, Tensor | None, Tensor]
"""Permuted tokens ``[rows, hidden]``, permuted probabilities ``[rows]``, packed row map."""


class RowMap(NamedTuple):
    """The rows of a permutation, all int32; packed into one tensor, because Megatron keeps one.

    Permuted rows lie expert by expert, and in the order of their tokens within each expert.
    """

    offsets: Tensor | None
    """``[tokens + 1]``: token ``t`` owns the entries ``offsets[t] .. offsets[t + 1]`` of :attr:`rows`. None:
    every token owns equally many."""
    rows: Tensor
    """``[rows]``: permuted rows, token by token, those of one token in ascending order."""
    tokens: Tensor
    """``[rows]``: the token of each permuted row; -1 where there is none."""
    experts: Tensor
    """``[rows]``: the expert of each permuted row; -1 where there is none."""

    def pack(self) -> Tensor:
        """One tensor, which :func:`unpack` takes apart again."""
        return torch.cat([part for part in self if part is not None])

    def starts(self, tokens: int) -> Tensor:
        """:attr:`offsets`, made where every token owns equally many rows."""
        if self.offsets is not None:
            return self.offsets
        return torch.arange(tokens + 1, dtype=torch.int32, device=self.rows.device) * (
            len(self.rows) // max(tokens, 1)
        )

    def slots(self, experts: int) -> Tensor:
        """``[rows]`` int32: position of each permuted row in a flattened ``[tokens, experts]``."""
        return self.tokens * experts + self.experts


def unpack(packed: Tensor, tokens: int, rows: int) -> RowMap:
    """Views of a packed map's parts.

    Args:
        packed: result of :meth:`RowMap.pack`.
        tokens: how many were permuted.
        rows: how many they became.

    Raises:
        ValueError: the sizes are those of another permutation.
    """
    bounds = len(packed) - 3 * rows
    if bounds not in (0, tokens + 1):
        raise ValueError(
            f"moe_permute: a row map of {len(packed)} numbers is not that of {tokens} tokens in {rows} rows; "
            "pass the one that permute returned with them"
        )
    offsets = packed[:bounds] if bounds else None
    return RowMap(offsets, *packed[bounds:].view(3, rows).unbind(0))


def unpack_for(
    packed: Tensor, routing_map: Tensor, grad_permuted: Tensor | None, grad_probs: Tensor | None
) -> RowMap:
    """Views of a packed map's parts, for gradients of which at least one is given."""
    grad = grad_permuted if grad_permuted is not None else grad_probs
    assert grad is not None
    return unpack(packed, len(routing_map), len(grad))


def of_routing(routing_map: Tensor, rows: int | None) -> RowMap:
    """The map of a routing, in plain PyTorch; waits for a device if nobody says how many entries there are.

    Args:
        routing_map: ``[tokens, experts]`` bool.
        rows: how many entries the caller counts in it, or None.

    Raises:
        ValueError: the map is on a CPU, and the caller's count is wrong.
    """
    if rows is not None and routing_map.device.type != "cpu":
        return of_counted_routing(routing_map, rows)
    tokens, experts = routing_map.shape
    slots = routing_map.reshape(-1).nonzero().view(-1)  # token by token
    if rows is not None and rows != len(slots):
        raise ValueError(
            f"moe_permute: the routing map sends its {tokens} tokens to {len(slots)} rows in all, and the "
            f"caller says {rows}; num_out_tokens must count the entries of the map"
        )
    by_token = slots // max(experts, 1)
    expert = slots - by_token * experts
    # Few bits make the sort short. Stable: rows of one expert keep the order of their tokens.
    order = (expert.to(torch.int16) if experts < 1 << 15 else expert).argsort(stable=True)
    place = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    first = torch.arange(tokens + 1, device=slots.device)
    return RowMap(
        torch.searchsorted(by_token, first, out_int32=True),
        torch.empty_like(place).index_copy_(0, order, place),
        by_token.index_select(0, order).int(),
        expert.index_select(0, order).int(),
    )


def of_counted_routing(routing_map: Tensor, rows: int) -> RowMap:
    """The map of a routing, by sums and scatters of int32; does not wait for the device.

    Args:
        routing_map: ``[tokens, experts]`` bool.
        rows: number of its entries. With another number rows are missing, or have any token and expert.
    """
    (tokens, experts), device = routing_map.shape, routing_map.device
    entries = routing_map.int()
    of_expert, of_token = (entries.sum(dim, dtype=torch.int32) for dim in (0, 1))
    # How many entries there are up to each position, itself included: expert by expert, and token by token.
    by_expert = entries.cumsum(0, dtype=torch.int32) + _begins(of_expert)
    by_token = entries.cumsum(1, dtype=torch.int32) + _begins(of_token)[:, None]
    token = torch.arange(tokens, dtype=torch.int32, device=device)[:, None]
    expert = torch.arange(experts, dtype=torch.int32, device=device)

    def of_entries(values: Tensor, up_to: Tensor, position: Tensor) -> Tensor:
        # Whatever is no entry goes behind, each to a place of its own: no size depends on the map.
        place = torch.where(routing_map, up_to - 1, rows + position - up_to)
        found = torch.zeros(rows + routing_map.numel(), dtype=torch.int32, device=device)
        return found.index_copy_(0, place.reshape(-1).long(), values.reshape(-1))[:rows]

    offsets = torch.zeros(tokens + 1, dtype=torch.int32, device=device)
    offsets[1:] = of_token.cumsum(0, dtype=torch.int32)
    return RowMap(
        offsets,
        of_entries(by_expert - 1, by_token, token * experts + expert),
        of_entries(token.expand(-1, experts), by_expert, expert * tokens + token),
        group_of_rows(of_expert, rows).clamp_(max=max(experts - 1, 0)),
    )


def chunk_rows(split_sizes: Tensor, order: Tensor, rows: int) -> Tensor:
    """Which row comes where when chunks are put in another order; does not wait for the device.

    Args:
        split_sizes: ``[chunks]``, rows of each chunk; their sum is ``rows``.
        order: ``[chunks]``: which chunk comes first, second and so on.
        rows: how many there are.

    Returns:
        ``[rows]`` int64: the row before, for each row after.
    """
    split_sizes = split_sizes.to(torch.int32)
    sizes = split_sizes.index_select(0, order)
    # How far back the rows of each chunk come from: where it begins before, less where it begins after.
    shift = _begins(split_sizes).index_select(0, order) - _begins(sizes)
    row = torch.arange(rows, device=split_sizes.device)
    return row + shift.index_select(0, group_of_rows(sizes, rows))


def group_of_rows(sizes: Tensor, rows: int) -> Tensor:
    """Which group each row lies in when groups of rows lie one after the other.

    Sums and a scatter of int32: Ascend's devices leave searches and sums of int64 to their few processor
    cores. Does not wait for the device.

    Args:
        sizes: ``[groups]`` int32, their sum is ``rows``.
        rows: how many there are.

    Returns:
        ``[rows]`` int32.
    """
    ends = sizes.cumsum(0, dtype=torch.int32)
    # How many groups end before each row.
    ended = torch.zeros(rows + 1, dtype=torch.int32, device=sizes.device)
    ended.scatter_add_(0, ends.clamp(max=rows).long(), torch.ones_like(ends))
    return ended[:rows].cumsum(0, dtype=torch.int32)


def _begins(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0, dtype=torch.int32) - sizes
