"""Kernels of the permutation of tokens by expert: rows are gathered, and sums have a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_rows_kernel(
    routing_map,
    rank,
    offsets,
    rows,
    tokens,
    experts,
    token_count,
    expert_count,
    row_count,
    BLOCK: tl.constexpr,
):
    """List the rows of a token, and write its token and expert for each of them; one program per token.

    ``rank [experts, tokens]`` is the inclusive count of the map's entries in the order of rows.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(offsets + token)
    for first in range(0, expert_count, BLOCK):
        expert = first + tl.arange(0, BLOCK)
        inside = expert < expert_count
        chosen = tl.load(routing_map + token * expert_count + expert, mask=inside, other=0).to(tl.int32)
        row = tl.load(rank + expert.to(tl.int64) * token_count + token, mask=inside, other=0) - 1
        # Position of each row in the token's part of the list.
        place = at + tl.cumsum(chosen, axis=0) - 1
        # A wrong number of rows from the caller must not cause writes beyond them.
        kept = (chosen != 0) & (row < row_count)
        tl.store(rows + place, row, mask=kept & (place < row_count))
        tl.store(tokens + row, tl.full([BLOCK], 0, tl.int32) + token.to(tl.int32), mask=kept)
        tl.store(experts + row, expert, mask=kept)
        at += tl.sum(chosen, axis=0)


@triton.jit
def gather_kernel(
    source,
    tokens,
    experts,
    probs,
    out,
    out_probs,
    hidden,
    expert_count,
    HAS_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a row's token and probability, or zeros if it has no token; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row).to(tl.int64)
    # For a row without a token nothing is read.
    readable = tl.where(token >= 0, hidden, 0)
    for first in range(0, hidden, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(source + token * hidden + column, mask=column < readable, other=0.0)
        tl.store(out + row * hidden + column, value, mask=column < hidden)
    if HAS_PROBS:
        slot = tl.maximum(token * expert_count + tl.load(experts + row), 0)
        value = tl.load(probs + slot)
        tl.store(out_probs + row, tl.where(token >= 0, value, 0.0).to(value.dtype))


@triton.jit
def add_up_kernel(
    source,
    offsets,
    rows,
    experts,
    probs,
    addend,
    out,
    hidden,
    expert_count,
    HAS_PROBS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a token's rows in order, in fp32; one program per token and block of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(tl.load(offsets + token), tl.load(offsets + token + 1)):
        row = tl.load(rows + at).to(tl.int64)
        readable = tl.where(row >= 0, hidden, 0)
        value = tl.load(source + row * hidden + column, mask=column < readable, other=0.0).to(tl.float32)
        if HAS_PROBS:
            expert = tl.load(experts + tl.maximum(row, 0))
            value *= tl.load(probs + token * expert_count + tl.maximum(expert, 0)).to(tl.float32)
        total += value
    if HAS_ADDEND:
        total += tl.load(addend + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weighted_gather_kernel(
    grad,
    permuted,
    tokens,
    experts,
    probs,
    out,
    grad_probs,
    hidden,
    expert_count,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of a permuted row, and of its probability in ``grad_probs [tokens, experts]``.

    One program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row).to(tl.int64)
    readable = tl.where(token >= 0, hidden, 0)
    # Negative for a row without a token, hence the maximum below.
    slot = token * expert_count + tl.load(experts + row)
    weight = tl.load(probs + tl.maximum(slot, 0)).to(tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for first in range(0, hidden, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < hidden
        value = tl.load(grad + token * hidden + column, mask=column < readable, other=0.0).to(tl.float32)
        product += value * tl.load(permuted + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * hidden + column, (value * weight).to(out.dtype.element_ty), mask=inside)
    if token >= 0:
        tl.store(grad_probs + slot, tl.sum(product, axis=0).to(grad_probs.dtype.element_ty))


@triton.jit
def scatter_probs_kernel(by_row, tokens, experts, dense, row_count, expert_count, BLOCK: tl.constexpr):
    """Write ``dense[tokens[r], experts[r]] = by_row[r]``; each (token, expert) has at most one row."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < row_count
    token = tl.load(tokens + row, mask=inside, other=-1).to(tl.int64)
    there = inside & (token >= 0)
    expert = tl.load(experts + row, mask=there, other=0)
    tl.store(dense + token * expert_count + expert, tl.load(by_row + row, mask=there, other=0.0), mask=there)
