"""Indexer loss in plain PyTorch on any device, in chunks of rows of bounded size.

`auto` takes this backend on GPUs that the Triton kernels do not support. Other backends use this module's
closed form of the divergence and its gradient too.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.ops.backend import takes_every_call
from mindspeed_dsa.ops.chunks import scratch_product
from mindspeed_dsa.ops.indexer_kl_loss.protocol import DenseCall
from mindspeed_dsa.ops.precision import gradient_dtype, total_dtype, wide
from mindspeed_dsa.ops.sparse_flash_attention.chunked import attention_sum as attention_sum
from mindspeed_dsa.ops.sparse_flash_attention.protocol import softmax

# Bytes for the scores of a chunk in the dense form. It must not depend on the machine: with tensor
# parallelism every rank must cut its rows at the same places.
_DENSE_BYTES = 256 << 20
# Entries per block of the sparse form, so that temporaries stay small, and in cache on a CPU.
_BLOCK = 256 * 1024

KIND: Literal["gradients"] = "gradients"
plan_dense = unsupported = takes_every_call


def divergence_and_gradient(
    topk_scores: Tensor, attention_sum: Tensor, valid: Tensor, row_weights: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the loss, and its gradient with respect to ``topk_scores``, ``[batch, query_length, topk]``."""
    total = torch.promote_types(topk_scores.dtype, total_dtype(topk_scores.device))
    loss = torch.zeros((), dtype=total, device=topk_scores.device)
    gradient = None
    if with_gradient:
        # Each block writes its part through a view of `gradient`, so it must be contiguous.
        # [batch, query_length, topk]
        gradient = torch.empty_like(topk_scores, memory_format=torch.contiguous_format)
    rows = max(1, _BLOCK // max(1, topk_scores.shape[-1]))
    # [rows, topk] per block, or [rows] for the weights: rows of all sequences form one axis.
    tensors = [x.flatten(0, 1).split(rows) for x in (topk_scores, attention_sum, valid, row_weights)]
    parts = None if gradient is None else gradient.flatten(0, 1).split(rows)
    for number, (scores, summed, names, weights) in enumerate(zip(*tensors, strict=True)):
        per_row, r_minus_p = divergence_of_rows(scores, summed, names)
        loss += (per_row * weights).sum(dtype=total)
        if parts is not None:
            torch.mul(r_minus_p, weights[:, None], out=parts[number])
    return loss.to(topk_scores.dtype), gradient


def divergence_of_rows(scores: Tensor, attention_sum: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence, ``[rows]``, and its gradient with respect to ``scores``, ``[rows, keys]``."""
    # Masked scores are the lowest finite number, so that log-probabilities are finite and 0 * log r is 0.
    lowest = torch.finfo(scores.dtype).min
    log_r = scores.masked_fill(~valid, lowest).log_softmax(dim=-1)
    attention_sum = attention_sum.to(scores.dtype)
    p = attention_sum / attention_sum.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    log_r.masked_fill_(~valid, 0)
    per_row = torch.xlogy(p, p).sum(dim=-1) - (p * log_r).sum(dim=-1)
    return per_row, log_r.exp_().sub_(p).masked_fill_(~valid, 0)


def dense_loss_and_gradients(
    call: DenseCall, with_gradients: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Return the loss over all visible keys, and its gradients with respect to the indexer's three inputs.

    Gradients of fp16 inputs are in fp32.
    """
    index_query, index_key, index_weights = call.index.query, call.index.key, call.index.weights
    query, key, softmax_scale, tp_group = call.query, call.key, call.softmax_scale, call.tp_group
    starts, ends, row_weights = call.ranges.starts, call.ranges.ends, call.row_weights
    (batch, query_length, heads), key_length = query.shape[:3], key.shape[1]
    # The wider of both sides' dtypes: indexer and main attention may differ.
    dtype, device = torch.promote_types(wide(index_query.dtype), wide(query.dtype)), query.device
    total = torch.promote_types(dtype, total_dtype(device))
    loss = torch.zeros((), dtype=total, device=device)
    grad_query, grad_weights = (
        torch.zeros(x.shape, dtype=gradient_dtype(x.dtype), device=device)
        for x in (index_query, index_weights)
    )
    grad_key = torch.zeros(index_key.shape, dtype=dtype, device=device)  # [batch, key_length, index_dim]
    position = torch.arange(key_length, device=device)
    widest = max(heads, index_query.shape[2])
    rows = max(1, _DENSE_BYTES // (4 * dtype.itemsize * widest * max(key_length, 1)))
    for b in range(batch if key_length else 0):
        main_key, keys = key[b].to(dtype), index_key[b].to(dtype)
        for first in range(0, query_length, rows):
            place = (b, slice(first, first + rows))
            seen = (position >= starts[place][:, None]) & (position < ends[place][:, None])  # [rows, keys]
            target = _target(query[place].to(dtype) * softmax_scale, main_key, seen, call.sink)
            if tp_group is not None:
                dist.all_reduce(target, group=tp_group)
            q, w = index_query[place].to(dtype), index_weights[place].to(dtype)
            product = scratch_product(q, keys.t())  # [rows, index_heads, keys]
            if call.index.use_relu:
                product = product.relu_()
            # scores: [rows, keys]
            per_row, grad = divergence_of_rows(torch.bmm(w[:, None], product)[:, 0], target, seen)
            loss += (per_row * row_weights[place]).sum(dtype=total)
            if not with_gradients:
                continue
            grad *= row_weights[place][:, None]
            # [rows, index_heads]
            grad_weights[place] = torch.bmm(product, grad[..., None])[..., 0].to(grad_weights.dtype)
            grad_product = w[..., None] * grad[:, None]  # [rows, index_heads, keys]
            if call.index.use_relu:
                # The derivative of relu at zero is zero.
                grad_product = grad_product.masked_fill_(product <= 0, 0)
            grad_query[place] = torch.matmul(grad_product, keys).to(grad_query.dtype)
            # [keys, rows * index_heads] @ [rows * index_heads, index_dim]
            grad_key[b] += torch.mm(grad_product.flatten(0, 1).t(), q.flatten(0, 1))
    gradients = (
        (grad_query, grad_key.to(gradient_dtype(index_key.dtype)), grad_weights) if with_gradients else None
    )
    return loss.to(wide(index_query.dtype)), gradients


def _target(query: Tensor, key: Tensor, seen: Tensor, sink: Tensor | None) -> Tensor:
    """Return the probabilities over the visible keys, summed over heads: ``[rows, keys]``, zero elsewhere.

    Args:
        query: ``[rows, heads, dim]``, scaled.
        key: ``[keys, dim]`` or ``[keys, heads, dim]``.
        seen: ``[rows, keys]`` bool.
        sink: ``[heads]``, or None.
    """
    if key.dim() == 2:
        scores = scratch_product(query, key.t())  # [rows, heads, keys]
    else:
        # [heads, rows, dim] @ [heads, dim, keys] -> [rows, heads, keys]
        scores = scratch_product(query.transpose(0, 1), key.permute(1, 2, 0)).transpose(0, 1)
    scores = softmax(scores.masked_fill_(~seen[:, None], torch.finfo(scores.dtype).min), sink)
    return scores.sum(dim=1).masked_fill_(~seen, 0)  # [rows, keys]
