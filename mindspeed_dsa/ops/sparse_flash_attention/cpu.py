"""Sparse flash attention on CPU: gather the keys of a few queries into cache, then multiply.

The forward has two small matmuls per tile, the backward five. A block holds complete rows, so the softmax
needs no second pass. The sum of the probabilities over heads, the target of the indexer loss, comes at no
extra cost. The gradient of the keys is added block by block in row order, which makes it deterministic.

If there are few keys, ``cpu_dense.py`` takes the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import Algorithm, ShapeClass, algorithm, takes_every_call
from mindspeed_dsa.ops.cpu.blocks import Block, Scratch, add_to_keys, over_blocks, sum_in_order
from mindspeed_dsa.ops.cpu.products import compute_dtype, product
from mindspeed_dsa.ops.sparse_flash_attention import cpu_dense
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall, softmax, with_sink_alone

OPERATOR = "sparse_flash_attention"
KIND: Literal["gradients"] = "gradients"
TAKES_PARTS = False
plan_call = takes_every_call


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    return None if shape.device == "cpu" else "it runs on CPU tensors only"


def forward(call: AttentionCall, with_sum: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the three fields of :class:`SparseAttentionOutput`."""
    forms = (
        Algorithm("by masking keys", cpu_dense.forward, cpu_dense.declines),
        Algorithm("by gathering keys", _forward, takes_every_call),
    )
    output: tuple[Tensor, Tensor, Tensor | None] = algorithm(OPERATOR, forms, call).run(call, with_sum)
    return output


def backward(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, with_sum: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of query and key_value, given the ``out`` of :func:`forward`.

    ``lse`` is not read. Blocks hold complete rows, so the softmax is recomputed, which is more accurate:
    ``lse`` is rounded after adding the maximum to the logarithm of the sum. The third result is the sum of
    the probabilities over heads, as in :func:`forward`, or None.
    """
    forms = (
        Algorithm("by masking keys", cpu_dense.backward, cpu_dense.declines),
        Algorithm("by gathering keys", _backward, takes_every_call),
    )
    run = algorithm(f"the gradient of {OPERATOR}", forms, call, grad_out).run
    gradients: tuple[Tensor, Tensor, Tensor | None] = run(call, grad_out, out, lse, with_sum)
    return gradients


def _forward(call: AttentionCall, with_sum: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    query, key_value, topk_indices = call.query, call.key_value, call.topk_indices
    softmax_scale, value_dim = call.softmax_scale, call.value_dim
    batch, query_length, heads, dim = query.shape
    dtype = compute_dtype(query.dtype)
    out = torch.empty(batch, query_length, heads, value_dim, dtype=query.dtype)
    lse = torch.empty(batch, query_length, heads, dtype=dtype)
    attention_sum = torch.zeros(topk_indices.shape, dtype=dtype) if with_sum else None

    def work(blocks: Iterator[Block], scratch: Scratch) -> None:
        for block in blocks:
            place, (rows, width) = (block.batch, block.rows), block.indices.shape
            q = scratch("query", rows, heads, dim).copy_(query[place])  # [n, heads, dim]
            scores, probabilities = (
                scratch(name, rows, heads, width) for name in ("scores", "probabilities")
            )
            full = scratch("out", rows, heads, dim)
            for keys, _, invalid, (q_, s_, p_, o_) in block.tiles(q, scores, probabilities, full):
                product(q_, keys.mT, s_, softmax_scale)
                if invalid is not None:
                    s_.masked_fill_(invalid[:, None], -torch.inf)
                softmax(s_, call.sink, p_)
                # The value is the leading slice of the key. A product with the whole dense key is faster than
                # one with the strided slice.
                product(p_, keys, o_)
            out[place] = full[..., :value_dim]
            # The most probable key has probability exp(0) / sum, so log(sum) needs no second pass of exp.
            lse[place] = scores.amax(dim=-1) - probabilities.amax(dim=-1).log_()
            if attention_sum is not None:
                torch.sum(probabilities, dim=1, out=attention_sum[place][:, :width])  # [n, width]
            if block.invalid is not None:
                # The softmax of a row without a key is 0 / 0.
                empty = block.invalid.all(dim=-1)  # [n]
                out[place].masked_fill_(empty[:, None, None], 0)
                lse[place].masked_fill_(empty[:, None], -torch.inf)
                if attention_sum is not None:
                    attention_sum[place].masked_fill_(empty[:, None], 0)

    over_blocks(key_value, topk_indices, 2 * heads, work)
    return out, with_sink_alone(lse, call.sink), attention_sum


def _backward(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, with_sum: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    query, key_value, topk_indices = call.query, call.key_value, call.topk_indices
    softmax_scale, value_dim = call.softmax_scale, call.value_dim
    heads, dim = query.shape[2:]
    dtype = compute_dtype(query.dtype)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    attention_sum = torch.zeros(topk_indices.shape, dtype=dtype) if with_sum else None

    def work(blocks: Iterator[Block], scratch: Scratch) -> Tensor:
        grad_key_value = torch.zeros(key_value.shape, dtype=dtype)  # [batch, key_length, dim], per thread
        for block in blocks:
            place, (rows, width) = (block.batch, block.rows), block.indices.shape
            # Stack the query on the output gradient: one product gives both the scores and the gradient of
            # the probabilities, and one product gives both paths into the key.
            stacked = scratch("stacked", rows, 2 * heads, dim)  # [n, 2 * heads, dim]
            stacked[:, :heads] = query[place]
            stacked[:, heads:, :value_dim] = grad_out[place]
            stacked[:, heads:, value_dim:] = 0
            # [n, heads, 1]: dO . o
            delta = (stacked[:, heads:, :value_dim] * out[place]).sum(dim=-1, keepdim=True)
            both = scratch("both", rows, 2 * heads, width)
            probabilities = scratch("probabilities", rows, heads, width)
            grad_q = scratch("grad_query", rows, heads, dim)
            total = grad_key_value[block.batch]
            for keys, indices, invalid, (stacked_, both_, p_, delta_, grad_q_) in block.tiles(
                stacked, both, probabilities, delta, grad_q
            ):
                product(stacked_, keys.mT, both_)
                scores, grad_p = both_.split(heads, dim=1)  # [n, heads, width] each
                scores.mul_(softmax_scale)
                if invalid is not None:
                    scores.masked_fill_(invalid[:, None], -torch.inf)
                softmax(scores, call.sink, p_)
                if invalid is not None:
                    # The softmax of a row without a key is 0 / 0.
                    p_.masked_fill_(invalid[:, None], 0)
                # In place: the upper half becomes the gradient of the scores, the lower half the
                # probabilities.
                torch.mul(grad_p.sub_(delta_), p_, out=scores).mul_(softmax_scale)
                grad_p.copy_(p_)
                product(scores, keys, grad_q_)
                add_to_keys(total, indices, both_, stacked_, scratch)
            grad_query[place] = grad_q
            if attention_sum is not None:
                torch.sum(probabilities, dim=1, out=attention_sum[place][:, :width])  # [n, width]
        return grad_key_value

    grad_key_value = sum_in_order(over_blocks(key_value, topk_indices, 3 * heads, work))
    return grad_query, grad_key_value, attention_sum
