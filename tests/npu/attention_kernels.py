"""CPU kernels of Lightning Indexer and Sparse Flash Attention with gradients, from torch_npu's manuals."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.npu.kernel_parts import (
    WIDTHS,
    by_layout,
    check_attention,
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


def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return indices by descending score, then -1, and scores in the query's dtype."""
    name = "npu_lightning_indexer"
    require(
        name,
        [query, key, weights],
        layouts=layout_query == layout_key,
        heads=query.shape[-2] <= 64 and key.shape[-2] == 1,
        head_dim=query.shape[-1] == 128,
        mode=sparse_mode == 3 and return_value,
        topk=1 <= sparse_count <= 2048 or sparse_count in WIDTHS,
    )
    int32(name, actual_seq_lengths_query, actual_seq_lengths_key)
    ends = (actual_seq_lengths_query, actual_seq_lengths_key)
    q, k, w = tokens(query), tokens(key)[:, 0], rows(weights, layout_query).float()
    indices = torch.full((q.shape[0], sparse_count), -1, dtype=torch.int32)
    # Undefined scores are NaN, so that their use shows.
    values = torch.full((q.shape[0], sparse_count), torch.nan)
    for sequence in sequences(name, layout_query, query, key, *ends):
        scores = index_scores(q[sequence.rows], k[sequence.keys], w[sequence.rows])
        best = scores.masked_fill(~sequence.visible, -torch.inf).sort(dim=-1, descending=True, stable=True)
        width = min(sparse_count, scores.shape[1])
        chosen = best.indices[:, :width].int().masked_fill(best.values[:, :width] == -torch.inf, -1)
        indices[sequence.rows, :width] = chosen
        values[sequence.rows, :width] = best.values[:, :width].masked_fill(chosen < 0, torch.nan)
    shape = (*query.shape[:-2], 1, sparse_count)
    return indices.view(shape), values.view(shape).to(query.dtype)


GRAD_TOPK = 2048
"""Entries of a row, and the fewest keys of a sequence, by the gradient's manual."""


def npu_lightning_indexer_grad(
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the indexer's inputs, given ``dy``, the gradients of the selected scores."""
    name = "npu_lightning_indexer_grad"
    require(
        name,
        [query, key, dy, weights],
        heads=query.shape[-2] == 64 and key.shape[-2:] == (1, 128),
        topk=dy.shape[-1] == GRAD_TOPK and sparse_indices.shape == dy.shape,
        mode=sparse_mode == 3,
        lengths=layout == "TND" or actual_seq_lengths_query is actual_seq_lengths_key is None,
    )
    int32(name, sparse_indices, actual_seq_lengths_query, actual_seq_lengths_key)
    q, k, w = tokens(query), tokens(key)[:, 0], rows(weights, layout).float()
    # NaN shows rows and keys that no sequence covers.
    grads = [torch.full_like(x, torch.nan) for x in (q, k, w)]
    indices, dy = rows(sparse_indices, layout), rows(dy, layout).float()
    for s in sequences(name, layout, query, key, actual_seq_lengths_query, actual_seq_lengths_key):
        assert s.keys.stop - s.keys.start >= GRAD_TOPK, f"{name}: fewer keys than topk"
        mask = selected(name, indices, s)
        here = indices[s.rows].long()
        # Entries of -1 add 0 to the first key.
        grad = torch.zeros(mask.shape).scatter_add_(1, here.clamp_min(0), dy[s.rows] * (here >= 0))
        grads[1][s.keys] = 0
        # Hold only a few rows at a time: 64 heads times all keys would be large.
        for first in range(s.rows.start, s.rows.stop, 128):
            part = slice(first, min(first + 128, s.rows.stop))
            g = grad[part.start - s.rows.start : part.stop - s.rows.start]
            grads[0][part], grad_key, grads[2][part] = index_gradients(g, q[part], k[s.keys], w[part])
            grads[1][s.keys] += grad_key
    shapes = zip(grads, (query, key, weights), strict=True)
    return tuple(grad.view(like.shape).to(like.dtype) for grad, like in shapes)  # type: ignore[return-value]


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention over the selected keys, with maximum and sum of the softmax."""
    name = "npu_sparse_flash_attention"
    parts = (query, key, value, query_rope, key_rope)
    check_attention(name, *parts, sparse_indices, (attention_mode, sparse_mode))
    int32(name, sparse_indices, actual_seq_lengths_query, actual_seq_lengths_kv)
    # Without the lengths the device's results match no formula.
    assert actual_seq_lengths_query is not None, f"{name}: lengths"
    assert (layout_query, sparse_block_size, return_softmax_lse) == (layout_kv, 1, True)
    q, k = with_rope(query, query_rope), with_rope(key, key_rope)[:, 0]
    indices = rows(sparse_indices.squeeze(-2), layout_query)
    out = torch.full((*q.shape[:2], 512), torch.nan)
    maximum, total = torch.full((2, *q.shape[:2]), torch.nan)
    for s in sequences(name, layout_query, query, key, actual_seq_lengths_query, actual_seq_lengths_kv):
        scores = scale_value * products(q[s.rows], k[s.keys])
        scores.masked_fill_(~selected(name, indices, s)[:, None], -torch.inf)
        maximum[s.rows] = scores.amax(-1)
        exponentials = (scores - maximum[s.rows][..., None]).exp()
        total[s.rows] = exponentials.sum(-1)
        out[s.rows] = torch.einsum("rhk,kd->rhd", exponentials, k[s.keys, :512]) / total[s.rows][..., None]
    return out.view(query.shape).to(query.dtype), *(
        by_layout(x, layout_query, query.shape[0]) for x in (maximum, total)
    )


def npu_sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = 2**63 - 1,
    next_tokens: int = 2**63 - 1,
    attention_mode: int = 0,
) -> tuple[Tensor, ...]:
    """Return gradients of query, key, value and both rotary parts; key and value have separate gradients."""
    name = "npu_sparse_flash_attention_grad"
    parts = (query, key, value, query_rope, key_rope)
    check_attention(name, *parts, sparse_indices, (attention_mode, sparse_mode))
    int32(name, sparse_indices, actual_seq_qlen, actual_seq_kvlen)
    require(name, [d_out, out], block_size=sparse_block_size == 1)
    q, k = with_rope(query, query_rope), with_rope(key, key_rope)[:, 0]
    indices, maximum, total = (
        rows(sparse_indices.squeeze(-2), layout),
        *(statistics(x, layout, query, key) for x in (softmax_max, softmax_sum)),
    )
    grad_out, o = tokens(d_out), tokens(out)
    grad_query = torch.full_like(q, torch.nan)
    grad_key, grad_value = torch.full_like(k, torch.nan), torch.full_like(k[:, :512], torch.nan)
    for s in sequences(name, layout, query, key, actual_seq_qlen, actual_seq_kvlen):
        chosen = selected(name, indices, s)[:, None]
        scores = scale_value * products(q[s.rows], k[s.keys])
        p = ((scores - maximum[s.rows]).exp() / total[s.rows]).masked_fill(~chosen, 0)
        # The gradient of a softmax is p (dp - sum(p dp)); the sum equals out x its gradient.
        delta = (grad_out[s.rows] * o[s.rows]).sum(-1, keepdim=True)
        ds = scale_value * p * (products(grad_out[s.rows], k[s.keys, :512]) - delta)
        grad_query[s.rows] = torch.einsum("rhk,kd->rhd", ds, k[s.keys])
        grad_key[s.keys] = torch.einsum("rhk,rhd->kd", ds, q[s.rows])
        grad_value[s.keys] = torch.einsum("rhk,rhd->kd", p, grad_out[s.rows])
    grads = (grad_query[..., :512], grad_key[:, :512], grad_value, grad_query[..., 512:], grad_key[:, 512:])
    return tuple(grad.reshape(part.shape).to(part.dtype) for grad, part in zip(grads, parts, strict=True))
