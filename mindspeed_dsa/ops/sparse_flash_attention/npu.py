"""Sparse flash attention on Ascend NPUs with torch_npu's forward and backward operators."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.npu.device import DTYPES, TOPK_WIDTHS, listed, npu_op, unavailable, unsupported_width
from mindspeed_dsa.ops.npu.layout import Layout, layout_of_selection
from mindspeed_dsa.ops.row_ranges import RowForm
from mindspeed_dsa.ops.sparse_flash_attention.chunked import attention_sum
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall, add_sink

_LATENT, _ROPE = 512, 64
_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
# Absorbed MLA, the only mode that the operators implement, with blocks of one key selected at a time.
_ABSORBED = 2
_BLOCK_SIZE = 1
_MOST_SEQUENCES = 256
_LONGEST_QUERY = 128 * 1024

KIND: Literal["gradients"] = "gradients"
TAKES_PARTS = True


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    reason = unavailable(shape.device, "npu_sparse_flash_attention", "npu_sparse_flash_attention_grad")
    if reason is not None:
        return reason
    if shape.dtype not in DTYPES:
        return "npu_sparse_flash_attention takes bfloat16 and float16 only"
    if (shape["value_dim"], shape["dim"]) != (_LATENT, _LATENT + _ROPE):
        return f"npu_sparse_flash_attention has {_LATENT} latent and {_ROPE} rotary dimensions only"
    if shape["heads"] not in _HEADS:
        return f"npu_sparse_flash_attention takes {listed(_HEADS)} heads"
    return None


def plan_call(call: AttentionCall, form: RowForm | None) -> Layout | str:
    """Return the operator layout for a call, or why this backend cannot take the call."""
    (batch, length, topk), key_length = call.topk_indices.shape, call.key_value.shape[1]
    reason = unsupported_width("npu_sparse_flash_attention_grad", topk, key_length)
    if reason is not None:
        return reason
    layout = layout_of_selection("sparse_flash_attention", call.topk_indices, key_length, form)
    if isinstance(layout, str):
        return layout
    sequences = batch if layout.sequences is None else len(layout.sequences)
    longest = length if layout.sequences is None else max(layout.sequences)
    if sequences > _MOST_SEQUENCES or longest > _LONGEST_QUERY:
        return (
            f"npu_sparse_flash_attention_grad takes up to {_MOST_SEQUENCES} sequences of up to "
            f"{_LONGEST_QUERY} rows"
        )
    return layout


def forward(call: AttentionCall, with_sum: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the three fields of :class:`SparseAttentionOutput`."""
    layout: Layout = call.plan
    query_latent, query_rope = _query_parts(layout, call)
    latent, key_rope = _key_parts(layout, call)
    out, maximum, total = npu_op("npu_sparse_flash_attention")(
        query_latent,
        latent,
        latent,
        layout.pack_widened(call.topk_indices, TOPK_WIDTHS[0]),
        call.softmax_scale,
        actual_seq_lengths_query=layout.query_lengths,
        actual_seq_lengths_kv=layout.key_lengths,
        query_rope=query_rope,
        key_rope=key_rope,
        sparse_block_size=_BLOCK_SIZE,
        layout_query=layout.name,
        layout_kv=layout.name,
        sparse_mode=3,
        attention_mode=_ABSORBED,
        return_softmax_lse=True,
    )
    lse = layout.unpack_statistics(maximum + total.log())  # [batch, query_length, heads]
    out = layout.unpack(out)
    # The operators have no sink.
    lse = add_sink(call.sink, lse, out)
    return out, lse, attention_sum(call.whole(), lse) if with_sum else None


def backward(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, with_sum: bool
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | tuple[Tensor, Tensor], Tensor | None]:
    """Return the gradients of query and key_value, given the ``out`` and ``lse`` of :func:`forward`.

    The third result is the sum of the probabilities over heads, as in :func:`forward`, or None. The operator
    does not return it, so it takes a separate pass.
    """
    layout: Layout = call.plan
    query_latent, query_rope = _query_parts(layout, call)
    latent, key_rope = _key_parts(layout, call)
    # The operator takes the forward's (maximum, total). The pair (lse, 1) gives the same exp(score - maximum)
    # / total.
    maximum = layout.pack_statistics(lse)
    grads = npu_op("npu_sparse_flash_attention_grad")(
        query_latent,
        latent,
        latent,
        layout.pack_widened(call.topk_indices, TOPK_WIDTHS[0]),
        layout.pack(grad_out),
        layout.pack(out),
        maximum,
        torch.ones_like(maximum),
        call.softmax_scale,
        _BLOCK_SIZE,
        query_rope=query_rope,
        key_rope=key_rope,
        actual_seq_qlen=layout.query_lengths,
        actual_seq_kvlen=layout.key_lengths,
        layout=layout.name,
        sparse_mode=3,
        attention_mode=_ABSORBED,
    )
    grad_latent_query, grad_key, grad_value, grad_query_rope, grad_key_rope = map(layout.unpack, grads)
    of_query = (grad_latent_query, grad_query_rope)
    # The operator takes the latent as key and as value: one tensor, so the gradients are added.
    # [batch, key_length, 512] and [batch, key_length, 64]
    of_key = ((grad_key + grad_value).squeeze(2), grad_key_rope.squeeze(2))
    return (
        # [batch, query_length, heads, 576]
        torch.cat(of_query, dim=-1) if call.query_rope is None else of_query,
        torch.cat(of_key, dim=-1) if call.key_rope is None else of_key,  # [batch, key_length, 576]
        attention_sum(call.whole(), lse) if with_sum else None,
    )


def _query_parts(layout: Layout, call: AttentionCall) -> tuple[Tensor, Tensor]:
    latent, rope = call.query, call.query_rope
    if rope is None:
        latent, rope = latent.split([_LATENT, _ROPE], dim=-1)  # [..., 512], [..., 64]
    return layout.pack(latent), layout.pack(rope)


def _key_parts(layout: Layout, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the latent and the rotary part of the key, each with a head axis of size 1."""
    latent, rope = call.key_value, call.key_rope
    if rope is None:
        # [batch, key_length, 512], [batch, key_length, 64]
        latent, rope = latent.split([_LATENT, _ROPE], dim=-1)
    # [batch, key_length, 1, 512] and [batch, key_length, 1, 64], in the operator's layout
    return layout.pack(latent[:, :, None]), layout.pack(rope[:, :, None])
