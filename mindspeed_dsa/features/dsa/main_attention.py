"""Main attention over the selected keys, absorbed or by head, on the operator or on PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.features.dsa.problem import Attended, Operands, Rows
from mindspeed_dsa.ops.documents import attend_by_documents
from mindspeed_dsa.ops.row_ranges import RowForm
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.by_head import sparse_attention_by_head


def attend_sparsely(
    operands: Operands,
    topk_indices: Tensor,
    backend: str,
    with_sum: bool,
    topk_scores: Tensor | None = None,
    score_gradient: Callable[[Tensor], Tensor] | None = None,
    form: RowForm | None = None,
) -> Attended:
    """Attend by the Sparse Flash Attention operator, or sparsely by head.

    Args:
        operands: query, key, value and scale.
        topk_indices: ``[b, s, topk]``, in the operators' format.
        backend: of the operator.
        with_sum: whether to return ``attention_sum``.
        topk_scores: see the operator; absorbed form only, and so is the next one.
        score_gradient: see the operator.
        form: see the operator.
    """
    # [b, s, heads, dim]
    query = operands.query.transpose(0, 1)
    if operands.absorbed:
        receiver, rope_receiver = (
            None if one is None else one.squeeze(2).transpose(0, 1)
            for one in (operands.key_receiver, operands.key_rope_receiver)
        )
        result = sparse_flash_attention(
            query,
            operands.key.squeeze(2).transpose(0, 1),
            topk_indices,
            operands.softmax_scale,
            value_dim=operands.latent,
            return_attention_sum=with_sum,
            topk_scores=topk_scores,
            score_gradient=score_gradient,
            **operands.ropes(),
            key_receiver=receiver,
            key_rope_receiver=rope_receiver,
            form=form,
            backend=backend,
        )
        return Attended(operands.up_projected(result.out), result.attention_sum, result.lse)

    out, summed = sparse_attention_by_head(
        query,
        operands.key.transpose(0, 1),
        operands.value.transpose(0, 1),
        topk_indices,
        operands.softmax_scale,
        return_attention_sum=with_sum,
        backend=backend,
    )
    return Attended(out.transpose(0, 1).flatten(2), summed)


def expanded_key(operands: Operands) -> Tensor:
    """Return the key with as many heads as the query, as Megatron's functions expect it."""
    return operands.key.expand(-1, -1, operands.query.shape[2], -1)


def attend_densely(operands: Operands, rows: Rows, backend: str) -> Attended:
    """Attend to all keys that a row sees.

    Uses PyTorch's attention wherever it has a kernel without an ``[s, s]`` buffer, for packed documents one
    after the other. Absorbed heads are too wide for that on accelerators; there the sparse operator gets
    every visible key.
    """
    query, keys = operands.query, operands.key.shape[0]
    if operands.absorbed and query.device.type != "cpu":
        visible = all_visible(query.shape[1], keys, query.device, rows)
        return attend_sparsely(operands, visible, backend, False, form=rows.form)
    operands = operands.whole()
    query, key, value = operands.query, operands.key, operands.value
    if operands.absorbed:
        key = expanded_key(operands)
        value = key[..., : operands.latent]
    if rows.starts is not None and rows.ends is not None:
        out = attend_by_documents(query, key, value, rows.starts, rows.ends, operands.softmax_scale)
        return Attended(operands.up_projected(out.transpose(0, 1)) if operands.absorbed else out.flatten(2))
    # The kernels require values as wide as keys.
    padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
    mask = None
    if rows.ends is not None:  # [s, keys]
        mask = torch.arange(key.shape[0], device=key.device) < rows.ends[:, None]
    # [s, b, heads, dim] -> [b, heads, s, dim]
    out = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        padded.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        scale=operands.softmax_scale,
    )[..., : value.shape[-1]]
    if operands.absorbed:
        return Attended(operands.up_projected(out.transpose(1, 2)))
    return Attended(out.permute(2, 0, 1, 3).flatten(2))


def all_visible(batch: int, keys: int, device: torch.device, rows: Rows) -> Tensor:
    """List ``[batch, rows, width]`` int32: all keys that each row sees, ascending, -1 at the tail."""
    position = torch.arange(rows.most_visible(keys), dtype=torch.int32, device=device)
    ends = position + 1 if rows.ends is None else rows.ends
    if rows.starts is not None:
        position = position + rows.starts[:, None]
    return position.where(position < ends[:, None], -1).expand(batch, -1, -1)
