"""CPU kernels of the indexer's fused losses, written from torch_npu's manuals."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.npu.kernel_parts import (
    Sequence,
    by_layout,
    check_attention,
    check_indexer,
    index_gradients,
    index_scores,
    int32,
    products,
    require,
    rows,
    selected,
    sequences,
    statistics,
    tokens,
    with_rope,
)

LONGEST = 8 * 1024
"""Most rows of a sequence, by the sparse form's manual."""
PART = 64


def npu_sparse_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of the indexer's inputs and the loss, both summed over rows."""
    name = "npu_sparse_lightning_indexer_grad_kl_loss"
    check_attention(name, query, key, key, query_rope, key_rope, sparse_indices, (2, sparse_mode))
    check_indexer(name, query, query_index, key_index, weights, (query.dtype,))
    assert query.shape[-2] in (64, 128), f"{name}: heads"
    int32(name, sparse_indices)
    q, k = with_rope(query, query_rope), with_rope(key, key_rope)[:, 0]
    indices = rows(sparse_indices.squeeze(-2), layout)
    maximum, total = (statistics(x, layout, query, key) for x in (softmax_max, softmax_sum))

    def target(s: Sequence) -> tuple[Tensor, Tensor]:
        selection = selected(name, indices, s)
        p = torch.empty(selection.shape)
        # Hold only a few rows at a time: 64 heads times all keys would be large.
        for first in range(0, selection.shape[0], PART):
            part = slice(s.rows.start + first, min(s.rows.start + first + PART, s.rows.stop))
            scores = scale_value * products(q[part], k[s.keys])
            p[first : first + PART] = ((scores - maximum[part]).exp_() / total[part]).sum(1)
        return p.masked_fill(~selection, 0), selection

    found = sequences(name, layout, query, key, actual_seq_qlen, actual_seq_klen)
    assert all(each.rows.stop - each.rows.start <= LONGEST for each in found), f"{name}: rows"
    return _losses(found, target, query_index, key_index, weights, layout)


def npu_dense_lightning_indexer_softmax_lse(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    *,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
) -> tuple[Tensor, Tensor]:
    """Return maximum and sum of the softmax of the index scores over all visible keys."""
    name = "npu_dense_lightning_indexer_softmax_lse"
    dtypes = (query_index.dtype, torch.float32)
    check_indexer(name, query_index, query_index, key_index, weights, dtypes)
    q, k, w = tokens(query_index), tokens(key_index)[:, 0], rows(weights, layout).float()
    maximum, total = torch.full((2, q.shape[0], 1), torch.nan)
    for s in sequences(name, layout, query_index, key_index, actual_seq_qlen, actual_seq_klen):
        scores = index_scores(q[s.rows], k[s.keys], w[s.rows]).masked_fill(~s.visible, -torch.inf)
        maximum[s.rows] = scores.amax(-1, keepdim=True)
        total[s.rows] = (scores - maximum[s.rows]).exp().sum(-1, keepdim=True)
    batch = query_index.shape[0]
    return tuple(by_layout(x, layout, batch).squeeze(-1) for x in (maximum, total))  # type: ignore[return-value]


def npu_dense_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    softmax_max_index: Tensor,
    softmax_sum_index: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of the indexer's inputs and the loss over all visible keys, both summed over rows."""
    name = "npu_dense_lightning_indexer_grad_kl_loss"
    heads = query.shape[-2]
    require(
        name,
        [query, key, query_rope, key_rope],
        heads=heads in (32, 64, 128) and key.shape[-2] == heads,
        dims=query.shape[-1] == key.shape[-1] == 128,
        rope=query_rope.shape[-1] == key_rope.shape[-1] == 64,
        mode=sparse_mode == 3,
    )
    check_indexer(name, query, query_index, key_index, weights, (query.dtype, torch.float32))
    q, k = with_rope(query, query_rope), with_rope(key, key_rope)
    maximum, total = (statistics(x, layout, query, key) for x in (softmax_max, softmax_sum))
    # One statistic per row and head.
    one_head = query_index[..., :1, :]
    index_maximum, index_total = (
        statistics(x[..., None], layout, one_head, key_index)[..., 0]
        for x in (softmax_max_index, softmax_sum_index)
    )

    def target(s: Sequence) -> tuple[Tensor, Tensor]:
        scores = scale_value * torch.einsum("rhd,khd->rhk", q[s.rows], k[s.keys])
        p = ((scores - maximum[s.rows]).exp() / total[s.rows]).sum(1)
        return p.masked_fill(~s.visible, 0), s.visible

    def predicted(s: Sequence, scores: Tensor) -> Tensor:
        return (scores - index_maximum[s.rows]).exp() / index_total[s.rows]

    found = sequences(name, layout, query, key, actual_seq_qlen, actual_seq_klen)
    return _losses(found, target, query_index, key_index, weights, layout, predicted)


def _losses(
    sequences: list[Sequence],
    target: Callable[[Sequence], tuple[Tensor, Tensor]],
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    layout: str,
    predicted: Callable[[Sequence, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, w = tokens(query_index), tokens(key_index)[:, 0], rows(weights, layout).float()
    grads = [torch.full_like(x, torch.nan) for x in (q, k, w)]
    loss = torch.zeros(1)
    for s in sequences:
        p, mask = target(s)
        p = p / p.sum(-1, keepdim=True)
        scores = index_scores(q[s.rows], k[s.keys], w[s.rows]).masked_fill(~mask, -torch.inf)
        r = scores.softmax(-1) if predicted is None else predicted(s, scores)
        loss += torch.where(mask & (p > 0), p * (p.log() - r.log()), 0).sum()
        grads[0][s.rows], grads[1][s.keys], grads[2][s.rows] = index_gradients(
            (r - p) * mask, q[s.rows], k[s.keys], w[s.rows]
        )
    results = [
        grad.view(like.shape).to(like.dtype)
        for grad, like in zip(grads, (query_index, key_index, weights), strict=True)
    ]
    return results[0], results[1], results[2], loss
