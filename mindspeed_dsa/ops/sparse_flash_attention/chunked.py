"""Sparse flash attention in plain PyTorch on any device, in chunks of rows with bounded gathered keys.

`auto` takes this backend on GPUs that the Triton kernels do not support. The reference would gather the keys
of all queries at once: 8192 x 2048 x 576 x 4 bytes = 39 GB for 8k queries.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import takes_every_call
from mindspeed_dsa.ops.chunks import row_chunks, scratch_product
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall, add_sink, softmax

KIND: Literal["gradients"] = "gradients"
TAKES_PARTS = False
plan_call = unsupported = takes_every_call


def forward(call: AttentionCall, with_sum: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the three fields of :class:`SparseAttentionOutput`."""
    query, key_value, topk_indices = call.query, call.key_value, call.topk_indices
    softmax_scale, value_dim = call.softmax_scale, call.value_dim
    batch, rows, heads, _ = query.shape
    dtype, device = wide(query.dtype), query.device
    out = torch.empty(batch, rows, heads, value_dim, dtype=query.dtype, device=device)
    lse = torch.empty(batch, rows, heads, dtype=dtype, device=device)
    summed = torch.empty(topk_indices.shape, dtype=dtype, device=device) if with_sum else None
    for chunk in row_chunks(key_value, topk_indices, 3 * heads):
        place = (chunk.batch, chunk.rows)
        # [n, heads, topk]
        scores = scratch_product(query[place].to(dtype) * softmax_scale, chunk.keys.transpose(1, 2))
        scores.masked_fill_(chunk.invalid[:, None], -torch.inf)
        lse[place] = scores.logsumexp(dim=-1)  # [n, heads]
        # The softmax of a row without a key is 0/0 until it is masked.
        probabilities = softmax(scores, call.sink).masked_fill_(chunk.invalid[:, None], 0)
        # [n, heads, value_dim]
        out[place] = torch.bmm(probabilities, chunk.keys[..., :value_dim]).to(query.dtype)
        if summed is not None:
            summed[place] = probabilities.sum(dim=1)  # [n, topk]
    return out, add_sink(call.sink, lse), summed


def backward(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, with_sum: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of query and key_value, given the ``out`` of :func:`forward`.

    ``lse`` is not read: chunks hold complete rows, and recomputing their softmax is more accurate than using
    ``lse``. The third result is the sum of the probabilities over heads, as in :func:`forward`, or None. On a
    GPU the gradient of the keys is added in no fixed order unless ``torch.use_deterministic_algorithms`` is
    on.
    """
    query, key_value, topk_indices = call.query, call.key_value, call.topk_indices
    softmax_scale, value_dim = call.softmax_scale, call.value_dim
    (heads, dim), dtype, device = query.shape[2:], wide(query.dtype), query.device
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_key_value = torch.zeros(key_value.shape, dtype=dtype, device=device)  # [batch, key_length, dim]
    summed = torch.empty(topk_indices.shape, dtype=dtype, device=device) if with_sum else None
    for chunk in row_chunks(key_value, topk_indices, 4 * heads + dim):
        place = (chunk.batch, chunk.rows)
        scaled, grad = query[place].to(dtype) * softmax_scale, grad_out[place].to(dtype)
        scores = torch.bmm(scaled, chunk.keys.transpose(1, 2))  # [n, heads, topk]
        hidden = chunk.invalid[:, None]  # [n, 1, topk]
        probabilities = softmax(scores.masked_fill_(hidden, -torch.inf), call.sink).masked_fill_(hidden, 0)
        if summed is not None:
            summed[place] = probabilities.sum(dim=1)
        delta = (grad * out[place]).sum(dim=-1, keepdim=True)  # [n, heads, 1]
        # [n, heads, topk]
        grad_scores = torch.bmm(grad, chunk.keys[..., :value_dim].transpose(1, 2))
        grad_scores.sub_(delta).mul_(probabilities)
        grad_query[place] = torch.bmm(grad_scores, chunk.keys).mul_(softmax_scale).to(query.dtype)
        # Gradient per selected key; the value is the leading part of the key.
        rows = torch.bmm(grad_scores.transpose(1, 2), scaled)  # [n, topk, dim]
        rows[..., :value_dim] += torch.bmm(probabilities.transpose(1, 2), grad)
        rows.masked_fill_(chunk.invalid[..., None], 0)
        # [n * topk, dim]
        grad_key_value[chunk.batch].index_add_(0, chunk.indices.flatten(), rows.flatten(0, 1))
    return grad_query, grad_key_value, summed


def attention_sum(call: AttentionCall, lse: Tensor | None) -> Tensor:
    """Return the probabilities summed over heads: ``[batch, query_length, topk]`` fp32.

    Args:
        call: arguments of the attention, with the rotary part in ``query``.
        lse: log-sum-exp, not read, as in :func:`backward`.
    """
    query, dtype = call.query, wide(call.query.dtype)
    summed = torch.zeros(call.topk_indices.shape, dtype=dtype, device=query.device)
    for chunk in row_chunks(call.key_value, call.topk_indices, 3 * query.shape[2]):
        place = (chunk.batch, chunk.rows)
        # [n, heads, topk]
        scores = scratch_product(query[place].to(dtype) * call.softmax_scale, chunk.keys.transpose(1, 2))
        scores.masked_fill_(chunk.invalid[:, None], torch.finfo(dtype).min)
        # [n, topk]
        summed[place] = softmax(scores, call.sink).sum(dim=1).masked_fill_(chunk.invalid, 0)
    return summed
