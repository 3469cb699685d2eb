"""FP8 key selection on CPU: fp32 scores with the Lightning Indexer's tiles, exact scores for near-ties.

fp32 sums depend on the library, the processor and the tile, and fp64 takes two to three times as long. So the
scores are computed in fp32, with a bound per row on their distance from the exact scores. Keys whose scores
are too close to the last selected score to decide are scored again, exactly. The selection is then the
reference's, bit for bit, for any library.
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

# Maximum number of key elements gathered in fp64 at once.
_GATHERED = 1 << 19

unsupported = indexer.unsupported


def select(call: QuantisedCall, topk: int, ranges: Ranges) -> Tensor:
    """Return the selected keys of each query, ``[batch, query_length, topk]`` int32."""
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
    """Return the keys for which approximate scores do not decide if they are among the ``kept`` best.

    A key is selected if its score exceeds the last selected score by more than twice ``difference``, and not
    selected if it is lower by more than that. All other keys are near, including keys with a NaN score or an
    infinite ``difference``.

    Args:
        scores: ``[g, rows, keys]``, each within the difference of the exact score.
        slab: slab with the starts and ends of the rows.
        seen: key range of the scores.
        kept: number of keys that a row selects, fewer than there are.
        difference: ``[g, rows]``, bound on the distance from the exact scores.

    Returns:
        ``[g, rows, keys]`` bool; all False in rows with a single near key, which is selected anyway.
    """
    position = torch.arange(seen.start, seen.stop, dtype=torch.int32)
    hidden = (position < slab.starts) | (position >= slab.ends)
    ordered = scores.masked_fill(hidden | scores.isnan(), -torch.inf)  # [g, rows, keys]
    ordered.numpy().partition(scores.shape[-1] - kept, axis=-1)
    last = ordered[..., scores.shape[-1] - kept, None]  # [g, rows, 1]: last selected score
    near = ((scores - last).abs() > 2 * difference[..., None]).logical_or_(hidden).logical_not_()
    return near.logical_and_(near.sum(dim=-1, keepdim=True) > 1)


def _settle(scores: Tensor, near: Tensor, slab: Slab, key: Tensor, factors: Tensor, use_relu: bool) -> None:
    """Overwrite the scores of near keys with exact scores.

    Args:
        scores: ``[g, rows, keys]``.
        near: ``[g, rows, keys]`` bool, keys to score exactly.
        slab: slab with quantised queries, and with weights times their factors.
        key: ``[g, keys, dim]``, quantised keys.
        factors: ``[g, keys]``, factors of the keys.
        use_relu: whether the product of each head is clamped at zero.
    """
    counts = near.sum(dim=-1)  # [g, rows]
    rows = counts.nonzero()  # [n, 2]: sequence and row
    if len(rows) == 0:
        return
    # Sorted by their number of near keys, because few rows have many: rows of a step are padded to the same
    # number.
    rows = rows[counts[rows[:, 0], rows[:, 1]].argsort()]
    first = 0
    while first < len(rows):
        most = int(counts[tuple(rows[first])])
        some = rows[first : first + max(1, _GATHERED // (most * key.shape[-1]))]
        most = int(counts[tuple(some[-1])])
        some = some[: max(1, _GATHERED // (most * key.shape[-1]))]
        first += len(some)
        b, r = some.unbind(dim=1)
        of_row, column = near[b, r].nonzero(as_tuple=True)  # [entries] each
        count = counts[b, r]  # [n]
        # Position of each entry among its row's entries.
        slot = torch.arange(len(column)) - (count.cumsum(0) - count)[of_row]  # [entries]
        columns = column.new_zeros(len(some), int(count.max()))  # [n, keys]
        columns[of_row, slot] = column
        keys = key[b[:, None], columns]  # [n, keys, dim]
        exact = exact_scores(
            slab.query[b, r][:, None],  # [n, 1, heads, dim]
            keys,
            slab.weights[b, r][:, None],  # [n, 1, heads]
            factors[b[:, None], columns],  # [n, keys]
            use_relu,
        )
        scores[b[of_row], r[of_row], column] = exact[of_row, 0, slot]
