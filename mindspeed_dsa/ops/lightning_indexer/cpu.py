"""Lightning Indexer on CPU: scores in slabs of rows, and selection by unique integer keys.

A slab holds the scores of a few rows with all keys that any of them sees, so memory is O(length) in addition
to the result. The fp32 score and the key position are packed into one int64 whose order is "higher score
first, then lower position". These int64 keys are unique, so any top-k algorithm gives the same selection.

If there are few keys, ``cpu_dense.py`` computes the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops.backend import Algorithm, ShapeClass, algorithm, takes_every_call
from mindspeed_dsa.ops.chunks import scratch_product
from mindspeed_dsa.ops.cpu.blocks import Block, Scratch, add_to_keys, over_blocks, sum_in_order
from mindspeed_dsa.ops.cpu.chunks import rows_of_sequences
from mindspeed_dsa.ops.cpu.products import compute_dtype, product
from mindspeed_dsa.ops.cpu.threads import share_out, worker_count
from mindspeed_dsa.ops.lightning_indexer import chunked, cpu_dense
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.row_ranges import Ranges

# Elements of the products of a slab, [rows * heads, keys], so that they stay in cache. The maximum numbers of
# rows are for one sequence, and for several sequences together.
_PRODUCT_ELEMENTS = 512 * 1024
_FEWEST_ROWS, _MOST_ROWS, _MOST_TOGETHER = 16, 64, 256
# Slab widths, and product widths in wide slabs, are rounded up, so that the number of distinct product shapes
# stays small.
_SLAB_STEP, _WIDTH_STEP = 64, 256
_LAST = 2**31 - 1

GRADIENTS = "the gradient of lightning_indexer"
KIND: Literal["gradients"] = "gradients"
plan_call = takes_every_call


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    if shape.device != "cpu":
        return "it runs on CPU tensors only"
    # NumPy is an optional dependency of torch, and Megatron requires it.
    return None if find_spec("numpy") else "it needs NumPy, which is not installed"


def select(call: IndexerCall, topk: int, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Return indices and scores of the selected keys, ``[batch, query_length, topk]`` each."""
    if call.pool > 1:
        return chunked.select(call, topk, ranges)

    def score(slab: Slab, seen: slice, kept: int, scratch: Scratch) -> Tensor:
        return slab_scores(slab, seen, call.use_relu, scratch)

    return select_by(call, topk, ranges, score)


def select_by(
    call: IndexerCall,
    topk: int,
    ranges: Ranges,
    score: Callable[[Slab, slice, int, Scratch], Tensor],
) -> tuple[Tensor, Tensor]:
    """Select the best keys, with scores from a callback that computes one slab of rows at a time.

    Args:
        call: arguments of the operator.
        topk: number of entries per row.
        ranges: ranges of the keys that each row sees.
        score: function that returns the scores of a slab's rows with a range of keys, ``[g, rows, keys]``.
            Its arguments are the slab, the range, the maximum number of keys to select from it, and a
            thread's scratch.

    Returns:
        Indices and scores of the selected keys, ``[batch, query_length, topk]`` each.
    """
    query, key, weights = call.query, call.key, call.weights
    starts, ends = ranges.starts, ranges.ends
    batch, query_length = query.shape[:2]
    topk_indices = torch.empty(batch, query_length, topk, dtype=torch.int32)
    dtype = compute_dtype(query.dtype)
    topk_scores = torch.empty(batch, query_length, topk, dtype=dtype)
    keys = key.detach().to(dtype).contiguous()  # [batch, key_length, head_dim]
    products_per_row = query.shape[2] * key.shape[1]
    most = min(max(_PRODUCT_ELEMENTS // max(products_per_row, 1), _FEWEST_ROWS), _MOST_TOGETHER)
    together, rows = rows_of_sequences(batch, most, _MOST_ROWS)
    by_row = (query, weights, starts[..., None], ends[..., None], topk_indices, topk_scores)
    slabs = []
    for first in range(0, batch, together):
        group = slice(first, first + together)
        bounds = _bounds(starts[group], ends[group], rows)
        parts = zip(*(x[group].split(rows, dim=1) for x in by_row), bounds, strict=True)
        slabs += [Slab(group, keys[group], *part) for part in parts]

    def work(share: Sequence[Slab]) -> None:
        scratch = Scratch(dtype)
        for slab in share:
            low, high, fewest = slab.bounds
            high = min(key.shape[1], low + -(-(high - low) // _SLAB_STEP) * _SLAB_STEP)
            # Rows that see fewer than topk keys, as in short documents, only pay for these keys.
            kept = min(topk, high - low)
            slab.topk_indices[..., kept:] = -1
            slab.topk_scores[..., kept:] = -torch.inf
            if kept == 0:
                continue
            # Adding 0.0 turns -0.0 into 0.0: they are equal scores with different bits.
            scores = score(slab, slice(low, high), kept, scratch).add_(0.0)  # [g, rows, high - low]
            position = torch.arange(low, high, dtype=torch.int32)  # [high - low]
            selected = _choose(scores, slab.starts, slab.ends, position, kept)  # [g, rows, kept]
            hidden = None
            if fewest < kept:
                hidden = (selected < slab.starts) | (selected >= slab.ends)
                selected.masked_fill_(hidden, _LAST)
            # Ascending positions; hidden entries, _LAST, move to the tail.
            selected.numpy().sort(axis=-1)
            columns = selected - low  # [g, rows, kept]
            if hidden is not None:
                hidden = selected == _LAST
                columns.masked_fill_(hidden, 0)
                selected.masked_fill_(hidden, -1)
            slab.topk_indices[..., :kept] = selected
            slab.topk_scores[..., :kept] = scores.gather(-1, columns)
            if hidden is not None:
                slab.topk_scores[..., :kept].masked_fill_(hidden, -torch.inf)

    share_out(slabs, work, worker_count(batch * query_length * products_per_row))
    return topk_indices, topk_scores


class _Bounds(NamedTuple):
    low: int
    high: int
    fewest: int
    """Fewest keys that a row of the slab sees."""


class Slab(NamedTuple):
    """Inputs and output views of one slab: a range of query rows, the same in several sequences."""

    sequences: slice
    """Sequences of the batch."""
    keys: Tensor
    """``[g, key_length, dim]``: all keys of each sequence."""
    query: Tensor
    """``[g, rows, heads, dim]``."""
    weights: Tensor
    starts: Tensor
    """``[g, rows, 1]``."""
    ends: Tensor
    topk_indices: Tensor
    topk_scores: Tensor
    bounds: _Bounds


def _bounds(starts: Tensor, ends: Tensor, rows: int) -> list[_Bounds]:
    """Return, for each slab of rows, the smallest key range that covers all keys visible to its rows."""
    sees, padding = starts < ends, (0, -starts.shape[1] % rows)
    # Pad the rows to whole slabs, then reduce over sequences and over the rows of each slab: [slabs].
    low = F.pad(torch.where(sees, starts, _LAST), padding, value=_LAST).amin(0).view(-1, rows).amin(-1)
    high = F.pad(torch.where(sees, ends, 0), padding).amax(0).view(-1, rows).amax(-1)
    fewest = F.pad(ends - starts, padding, value=_LAST).amin(0).view(-1, rows).amin(-1)
    return [_Bounds(*slab) for slab in torch.stack([low.minimum(high), high, fewest], dim=-1).tolist()]


def slab_scores(slab: Slab, seen: slice, use_relu: bool, scratch: Scratch) -> Tensor:
    """Return the scores of a slab's rows with a range of keys: ``[g, rows, keys]``."""
    some, rows, heads, dim = slab.query.shape
    weights = slab.weights.to(scratch.dtype).reshape(some * rows, 1, heads)  # [g * rows, 1, heads]
    scores = weights.new_empty(some, rows, seen.stop - seen.start)
    width = max(_WIDTH_STEP, _PRODUCT_ELEMENTS // (some * rows * heads) // _WIDTH_STEP * _WIDTH_STEP)
    flat = scratch("query", some, rows * heads, dim)
    flat.view(some, rows, heads, dim).copy_(slab.query)
    for first in range(seen.start, seen.stop, width):
        part = slice(first, min(first + width, seen.stop))
        # [g, rows * heads, width], which fits the cache
        products = scratch("products", some, rows * heads, part.stop - first)
        product(flat, slab.keys[:, part].mT, products)
        if use_relu:
            products.relu_()
        summed = torch.bmm(weights, products.view(some * rows, heads, -1))  # [g * rows, 1, width]
        scores[..., first - seen.start : part.stop - seen.start] = summed.view(some, rows, -1)
    return scores


def _choose(scores: Tensor, starts: Tensor, ends: Tensor, position: Tensor, topk: int) -> Tensor:
    """Return positions of the ``topk`` highest scores of each row, in any order: int64 ``[g, rows, topk]``.

    NaN ranks below every number, and keys that a row does not see rank below NaN.
    """
    width = scores.shape[-1]
    if topk == width:
        return position.to(torch.int64).repeat(*scores.shape[:-1], 1)  # [g, rows, topk]
    integer = torch.int32 if scores.dtype == torch.float32 else torch.int64
    limits = torch.iinfo(integer)
    # Flipping the magnitude bits of negative floats makes the integers' order, in two's complement, the order
    # of the floats.
    bits = scores.view(integer)
    ordered = (bits >> (limits.bits - 1)).bitwise_and_(limits.max).bitwise_xor_(bits)
    if scores.amax().isnan():
        # One above the lowest integer, which stands for unseen keys. Only NaN maps to integers this low.
        ordered.masked_fill_(scores.isnan(), limits.min + 1)
    # `seen` is the sign of both differences: -1 if a row sees the key, 0 otherwise. Bool masks would take
    # several times as long.
    seen = (position - ends).bitwise_and_((position - starts).bitwise_not_()).bitwise_right_shift_(31)
    ordered = torch.minimum(ordered, seen.to(integer).bitwise_xor_(limits.min))
    if integer == torch.int64:
        # No integer holds an fp64 score and a position, so sort stably instead.
        best = ordered.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
        return position[best].to(torch.int64)
    packed = ordered.to(torch.int64).bitwise_left_shift_(32).bitwise_or_((_LAST - position).to(torch.int64))
    # NumPy's partition and sort are vectorized over integers; PyTorch compares one pair at a time.
    packed.numpy().partition(width - topk, axis=-1)
    return packed[..., width - topk :].bitwise_not().bitwise_and_(_LAST)


def scores_at(call: IndexerCall, topk_indices: Tensor) -> Tensor:
    """Return the scores of the keys in ``topk_indices``: ``[batch, query_length, topk]``."""
    query, key, weights = call.query, call.key, call.weights
    heads, dtype = query.shape[2], compute_dtype(query.dtype)
    out = torch.full(topk_indices.shape, -torch.inf, dtype=dtype)  # [batch, query_length, topk]

    def work(blocks: Iterator[Block], scratch: Scratch) -> None:
        for block in blocks:
            place, (rows, width) = (block.batch, block.rows), block.indices.shape
            products, q = scratch("products", rows, heads, width), query[place].to(dtype)
            for keys, _, _, (q_, products_) in block.tiles(q, products):
                product(q_, keys.mT, products_)
            if call.use_relu:
                products.relu_()
            # [n, 1, heads] @ [n, heads, width] -> [n, width]
            scores = scratch_product(weights[place].to(dtype)[:, None], products)[:, 0]
            if block.invalid is not None:
                scores.masked_fill_(block.invalid, -torch.inf)
            out[place][:, :width] = scores

    over_blocks(key, topk_indices, heads, work)
    return out


def score_gradients(
    call: IndexerCall, topk_indices: Tensor, grad_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the scores at ``topk_indices`` with respect to query, key and weights."""
    forms = (
        Algorithm("by masking keys", cpu_dense.score_gradients, cpu_dense.declines),
        Algorithm("by gathering keys", _gathered_gradients, takes_every_call),
    )
    facts = (call, topk_indices, grad_scores)
    gradients: tuple[Tensor, Tensor, Tensor] = algorithm(GRADIENTS, forms, *facts).run(*facts)
    return gradients


def _gathered_gradients(
    call: IndexerCall, topk_indices: Tensor, grad_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, weights = call.query, call.key, call.weights
    heads, dtype = query.shape[2], compute_dtype(query.dtype)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)

    def work(blocks: Iterator[Block], scratch: Scratch) -> Tensor:
        grad_key = torch.zeros(key.shape, dtype=dtype)  # [batch, key_length, head_dim]
        for block in blocks:
            place, (rows, width) = (block.batch, block.rows), block.indices.shape
            # [n, heads, dim], [n, heads, 1]
            q, w = query[place].to(dtype), weights[place].to(dtype)[..., None]
            grad = grad_scores[place][:, None, :width].to(dtype)  # [n, 1, width]
            if block.invalid is not None:
                grad = grad.masked_fill(block.invalid[:, None], 0)
            weighted = torch.mul(q, w, out=scratch("weighted", *q.shape))
            # grad_product is the gradient of the products without the head's weight, and pulled is its
            # product with the keys: the gradients of query and weights follow from pulled in one step each.
            grad_product = scratch("grad_product", rows, heads, width)
            pulled = scratch("pulled", *q.shape)  # [n, heads, dim]
            for keys, indices, _, (q_, grad_, slopes, pulled_, weighted_) in block.tiles(
                q, grad, grad_product, pulled, weighted
            ):
                if call.use_relu:
                    # The derivative of relu at zero is zero.
                    products = scratch("key products", *slopes.shape)
                    product(q_, keys.mT, products)
                    torch.ops.aten.threshold_backward.grad_input(
                        grad_.expand_as(products), products, 0, grad_input=slopes
                    )
                else:
                    slopes.copy_(grad_.expand_as(slopes))
                product(slopes, keys, pulled_)
                add_to_keys(grad_key[block.batch], indices, slopes, weighted_, scratch)
            grad_weights[place] = (q * pulled).sum(dim=-1)  # [n, heads]
            grad_query[place] = pulled.mul_(w)
        return grad_key

    grad_key = sum_in_order(over_blocks(key, topk_indices, heads, work))
    return grad_query, grad_key, grad_weights
