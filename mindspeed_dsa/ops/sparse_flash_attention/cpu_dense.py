"""Sparse flash attention on CPU for few keys, in dense chunks of rows: see ``ops/cpu/chunks.py``.

The mask is a count: how often each row selected each key. A key that is listed twice counts twice, as it does
when keys are gathered. Masked scores stay finite, because infinities cost up to twenty times the time:
``masked_fill_`` with one mask for all heads is slow, and so are MKL's ``exp`` and ``log`` if the result is 0
or -inf.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu.blocks import Scratch, sum_in_order
from mindspeed_dsa.ops.cpu.chunks import NOT_FINITE, Chunk, over_chunks, products_are_finite
from mindspeed_dsa.ops.cpu.products import compute_dtype, product
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall, softmax, with_sink_alone

# Number subtracted from masked scores; other scores are far smaller.
_HIDES = torch.finfo(torch.float32).max


def declines(call: AttentionCall, *others: Tensor) -> str | None:
    """Return why masking is unsafe, or slower than gathering keys, for this call; or None.

    Args:
        call: arguments of the attention.
        others: tensors that are multiplied with keys as well, such as the output gradient.
    """
    topk = call.topk_indices.shape[2]
    most = most_keys(call.query.shape[2], topk)
    if call.key_value.shape[1] > most:
        return f"it is faster up to {most / max(topk, 1):.1f} times as many keys as are selected"
    if not products_are_finite(call.query, call.key_value, *others, factor=call.softmax_scale):
        return NOT_FINITE
    return None


def most_keys(heads: int, topk: int) -> float:
    """Return the number of keys up to which masking is faster than gathering, forward and backward together.

    Measured with causal rows on one thread, as a multiple of ``topk``: 12 with 4 heads, 4 with 16 and nearly
    2 with 128. With one head, masking was still faster at a multiple of 11, the largest that was tried.
    """
    return topk * min(12.0, 1.5 + 42 / heads)


def forward(call: AttentionCall, with_sum: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute :func:`mindspeed_dsa.ops.sparse_flash_attention.cpu.forward` by masking."""
    query, key_value, topk_indices = call.query, call.key_value, call.topk_indices
    softmax_scale, value_dim = call.softmax_scale, call.value_dim
    batch, query_length, heads, dim = query.shape
    dtype = compute_dtype(query.dtype)
    out = torch.empty(batch, query_length, heads, value_dim, dtype=query.dtype)
    lse = torch.empty(batch, query_length, heads, dtype=dtype)
    attention_sum = torch.empty(topk_indices.shape, dtype=dtype) if with_sum else None

    def work(chunks: Iterator[Chunk], scratch: Scratch) -> None:
        for chunk in chunks:
            place = (chunk.batch, chunk.rows)
            counts, duplicates = _counts(chunk, scratch)  # [g, n, width]
            some, rows, width = counts.shape
            # Rows and heads form one axis, so that each sequence is one large product.
            q = scratch("query", some, rows * heads, dim)
            q.view(some, rows, heads, dim).copy_(query[place])
            scores, probabilities = (
                scratch(name, some, rows * heads, width) for name in ("scores", "probabilities")
            )
            full = scratch("out", some, rows * heads, value_dim)  # [g, n * heads, value_dim]
            product(q, chunk.key.mT, scores, softmax_scale)
            by_head = scores.view(some, rows, heads, width)  # [g, n, heads, width]
            # Adding log(count) multiplies the exponential with the count, and masks keys with count 0.
            by_head.add_(_log(counts, duplicates, scratch)[:, :, None])
            softmax(by_head, call.sink, probabilities.view(by_head.shape))
            product(probabilities, chunk.key[..., :value_dim], full)
            out[place] = full.view(some, rows, heads, value_dim)  # [g, n, heads, value_dim]
            # The most probable key has probability exp(0) / sum, so log(sum) needs no second pass of exp.
            # [g, n, heads]
            lse[place] = (scores.amax(dim=-1) - probabilities.amax(dim=-1).log_()).view(some, rows, heads)
            by_head = probabilities.view(some, rows, heads, width)  # [g, n, heads, width]
            # So far a row without a key has attended to all keys of the range.
            if chunk.has_empty_row:
                empty = counts.amax(dim=-1) == 0  # [g, n]
                by_head.masked_fill_(empty[..., None, None], 0)
                out[place].masked_fill_(empty[..., None, None], 0)
                lse[place].masked_fill_(empty[..., None], -torch.inf)
            if attention_sum is not None:
                _sum_heads(chunk, by_head, counts if duplicates else None, attention_sum[place], scratch)

    over_chunks(key_value, topk_indices, heads, work)
    return out, with_sink_alone(lse, call.sink), attention_sum


def backward(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, with_sum: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute :func:`mindspeed_dsa.ops.sparse_flash_attention.cpu.backward` by masking."""
    query, key_value, topk_indices = call.query, call.key_value, call.topk_indices
    softmax_scale, value_dim = call.softmax_scale, call.value_dim
    heads, dim = query.shape[2:]
    dtype = compute_dtype(query.dtype)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    attention_sum = torch.empty(topk_indices.shape, dtype=dtype) if with_sum else None

    def work(chunks: Iterator[Chunk], scratch: Scratch) -> Tensor:
        grad_key_value = torch.zeros(key_value.shape, dtype=dtype)  # [batch, key_length, dim], per thread
        for chunk in chunks:
            place = (chunk.batch, chunk.rows)
            counts, duplicates = _counts(chunk, scratch)  # [g, n, width]
            some, rows, width = counts.shape
            q = scratch("query", some, rows * heads, dim)
            grad = scratch("grad", some, rows * heads, value_dim)
            q.view(some, rows, heads, dim).copy_(query[place])
            grad.view(some, rows, heads, value_dim).copy_(grad_out[place])
            delta = (grad * out[place].flatten(1, 2)).sum(dim=-1, keepdim=True)  # [g, n * heads, 1]
            probabilities, grad_scores = (
                scratch(name, some, rows * heads, width) for name in ("probabilities", "grad_scores")
            )
            grad_q = scratch("grad_query", some, rows * heads, dim)
            product(q, chunk.key.mT, probabilities, softmax_scale)
            by_head = probabilities.view(some, rows, heads, width)  # [g, n, heads, width]
            by_head.add_(_log(counts, duplicates, scratch)[:, :, None])
            softmax(by_head, call.sink, by_head)
            if chunk.has_empty_row:
                by_head.masked_fill_((counts.amax(dim=-1) == 0)[..., None, None], 0)
            product(grad, chunk.key[..., :value_dim].mT, grad_scores)
            grad_scores.sub_(delta).mul_(probabilities)
            product(grad_scores, chunk.key, grad_q, softmax_scale)
            grad_query[place] = grad_q.view(some, rows, heads, dim)  # [g, n, heads, dim]
            # [g, width, dim], a view: both paths into the key add to it.
            total = grad_key_value[chunk.batch, chunk.keys]
            product(grad_scores.mT, q, total, softmax_scale, add=True)
            product(probabilities.mT, grad, total[..., :value_dim], add=True)
            if attention_sum is not None:
                _sum_heads(chunk, by_head, counts if duplicates else None, attention_sum[place], scratch)
        return grad_key_value

    grad_key_value = sum_in_order(over_chunks(key_value, topk_indices, heads, work))
    return grad_query, grad_key_value, attention_sum


def _counts(chunk: Chunk, scratch: Scratch) -> tuple[Tensor, bool]:
    """Return how often each row selected each key, ``[g, n, width]``, and whether some count exceeds 1."""
    ones = scratch("ones", *chunk.columns.shape).fill_(1)  # [g, n, topk]
    counts = chunk.spread(ones, scratch)
    return counts, bool(counts.amax() > 1)


def _log(counts: Tensor, duplicates: bool, scratch: Scratch) -> Tensor:
    """Return the logarithm of the counts, ``[g, n, width]``; for 0 a finite number below all scores."""
    log = torch.clamp(counts, max=1, out=scratch("log", *counts.shape))
    log.sub_(1).mul_(_HIDES)
    return log.add_(counts.clamp_min(1).log_()) if duplicates else log


def _sum_heads(
    chunk: Chunk, probabilities: Tensor, counts: Tensor | None, out: Tensor, scratch: Scratch
) -> None:
    """Sum the probabilities over heads: ``[g, n, heads, width]`` per key -> ``[g, n, topk]`` per entry.

    ``counts`` is set if a row may have selected a key twice. Duplicate entries then divide the probability
    equally.
    """
    # The additional last column is the zero that entries without a key read.
    summed = scratch("summed", *probabilities.shape[:2], chunk.width + 1)  # [g, n, width + 1]
    torch.sum(probabilities, dim=2, out=summed[..., :-1])
    if counts is not None:
        summed[..., :-1].div_(counts.clamp_min(1))
    summed[..., -1] = 0
    torch.gather(summed, 2, chunk.columns, out=out)  # [g, n, topk]
