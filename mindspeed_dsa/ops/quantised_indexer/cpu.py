"""Quantised selection on CPU: scores in fp32 by the tiles of the Lightning Indexer, near-ties exactly.

Sums of fp32 products depend on the library, the processor and the tile, and fp64 takes two to three times as
long. So the scores are formed in fp32, and how far they can be from the exact ones is bounded for each row.
Scores that this leaves open, near those of the last key to be taken, are formed anew, exactly. What is
selected is then what the reference selects, bit for bit, whatever the products are made of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu.blocks import Scratch
from mindspeed_dsa.ops.lightning_indexer import cpu as indexer
from mindspeed_dsa.ops.lightning_indexer.cpu import Slab, select_by, slab_scores
from mindspeed_dsa.ops.quantised_indexer.arithmetic import (
    QuantisedCall,
    exact_scores,
    largest_difference,
    longest_key,
    quantise,
)
from mindspeed_dsa.ops.row_ranges import Ranges

# Numbers of keys in fp64 that are gathered at once.
_GATHERED = 1 << 19

unsupported = indexer.unsupported


def select(call: QuantisedCall, topk: int, ranges: Ranges) -> Tensor:
    """Return the keys that rows select, ``[batch, query_length, topk]`` int32."""
    key, of_key = quantise(call.key, call.powers_of_two)
    length, largest = longest_key(key, of_key), float(of_key.nan_to_num(0.0, 0.0, 0.0).max())

    def score(slab: Slab, seen: slice, kept: int, scratch: Scratch) -> Tensor:
        query, of_query = quantise(slab.query, call.powers_of_two)
        weights = slab.weights.float() * of_query
        slab = slab._replace(query=query, weights=weights)
        factors = of_key[slab.sequences, seen]
        scores = slab_scores(slab, seen, call.use_relu, scratch).mul_(factors[:, None])
        if kept < scores.shape[-1]:
            difference = largest_difference(query, weights, length[slab.sequences], largest)
            near = _near_the_last(scores, slab, seen, kept, difference)
            _settle(scores, near, slab, key[slab.sequences, seen], factors, call.use_relu)
        return scores

    quantised = QuantisedCall(call.query, key, call.weights, call.use_relu)
    return select_by(quantised, topk, ranges, score)[0]


def _near_the_last(scores: Tensor, slab: Slab, seen: slice, kept: int, difference: Tensor) -> Tensor:
    """Return which keys may or may not be among the ``kept`` best ones of their row, by exact scores.

    A key whose score is above the last one's by more than twice the difference is among the best, and one
    below by as much is not. What is compared with NaN, or differs by no bound, is near.

    Args:
        scores: ``[g, rows, keys]``, each within the difference of the exact one.
        slab: whose starts and ends say which keys a row sees.
        seen: the range of keys that the scores are of.
        kept: keys that a row selects, fewer than there are.
        difference: ``[g, rows]``.

    Returns:
        ``[g, rows, keys]`` bool; none in rows where only one would be.
    """
    position = torch.arange(seen.start, seen.stop, dtype=torch.int32)
    hidden = (position < slab.starts) | (position >= slab.ends)
    ordered = scores.masked_fill(hidden | scores.isnan(), -torch.inf)
    ordered.numpy().partition(scores.shape[-1] - kept, axis=-1)
    last = ordered[..., scores.shape[-1] - kept, None]
    near = ((scores - last).abs() > 2 * difference[..., None]).logical_or_(hidden).logical_not_()
    return near.logical_and_(near.sum(dim=-1, keepdim=True) > 1)


def _settle(scores: Tensor, near: Tensor, slab: Slab, key: Tensor, factors: Tensor, use_relu: bool) -> None:
    """Write exact scores where they are asked for.

    Args:
        scores: ``[g, rows, keys]``.
        near: ``[g, rows, keys]`` bool.
        slab: with quantised queries, and weights times their factors.
        key: ``[g, keys, dim]``, quantised.
        factors: ``[g, keys]``.
        use_relu: whether the product of each head is clamped at zero.
    """
    counts = near.sum(dim=-1)
    rows = counts.nonzero()
    if len(rows) == 0:
        return
    # Rows with as many keys one after the other, as few of them have many.
    rows = rows[counts[rows[:, 0], rows[:, 1]].argsort()]
    first = 0
    while first < len(rows):
        most = int(counts[tuple(rows[first])])
        some = rows[first : first + max(1, _GATHERED // (most * key.shape[-1]))]
        most = int(counts[tuple(some[-1])])
        some = some[: max(1, _GATHERED // (most * key.shape[-1]))]
        first += len(some)
        b, r = some.unbind(dim=1)
        of_row, column = near[b, r].nonzero(as_tuple=True)
        count = counts[b, r]
        slot = torch.arange(len(column)) - (count.cumsum(0) - count)[of_row]
        columns = column.new_zeros(len(some), int(count.max()))
        columns[of_row, slot] = column
        # [n, keys, dim]
        keys = key[b[:, None], columns]
        found = exact_scores(
            slab.query[b, r][:, None],
            keys,
            slab.weights[b, r][:, None],
            factors[b[:, None], columns],
            use_relu,
        )
        scores[b[of_row], r[of_row], column] = found[of_row, 0, slot]
