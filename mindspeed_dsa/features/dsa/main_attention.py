"""Main attention over the selected keys, in absorbed or per-head form."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import Attended, Rows
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
    """Compute attention to the selected keys with the Sparse Flash Attention operator.

    Args:
        operands: query, key, value and scale, in absorbed or per-head form.
        topk_indices: selected keys ``[b, s, topk]`` int32, -1 at the tail.
        backend: backend of the operator.
        with_sum: whether to return ``attention_sum``, the probabilities summed over heads.
        topk_scores: indexer scores of the selected keys, see :func:`sparse_flash_attention`; absorbed form
            only.
        score_gradient: callback that backward calls, see :func:`sparse_flash_attention`; absorbed form only.
        form: description of the visible ranges, if the host knows it.
    """
    query = operands.query.transpose(0, 1)  # [b, s, heads, dim]
    if operands.absorbed:
        # [keys, b, 1, dim] -> [b, keys, dim]
        receiver, rope_receiver = (
            None if one is None else one.squeeze(2).transpose(0, 1)
            for one in (operands.key_receiver, operands.key_rope_receiver)
        )
        result = sparse_flash_attention(
            query,
            operands.key.squeeze(2).transpose(0, 1),  # [b, keys, latent + rope]
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
        operands.key.transpose(0, 1),  # [b, keys, heads, dim]
        operands.value.transpose(0, 1),  # [b, keys, heads, value_dim]
        topk_indices,
        operands.softmax_scale,
        return_attention_sum=with_sum,
        backend=backend,
    )
    return Attended(out.transpose(0, 1).flatten(2), summed)  # [s, b, heads * value_dim]


def expanded_key(operands: Operands) -> Tensor:
    """Return the key expanded to all heads without a copy, as Megatron's functions expect."""
    # [s, b, 1, dim] -> [s, b, heads, dim], a view without a copy
    return operands.key.expand(-1, -1, operands.query.shape[2], -1)


def attend_densely(operands: Operands, rows: Rows, backend: str) -> Attended:
    """Compute attention to all keys that each query sees.

    Uses PyTorch's attention kernels, with one call per packed document, to avoid an ``[s, s]`` buffer. On
    accelerators, absorbed heads are too wide for these kernels; the sparse operator then gets all visible
    keys as its selection.
    """
    query, keys = operands.query, operands.key.shape[0]
    # absorbed heads are e.g. 512 + 64 = 576 wide
    if operands.absorbed and query.device.type != "cpu":
        visible = all_visible(query.shape[1], keys, query.device, rows)  # [b, s, width]
        return attend_sparsely(operands, visible, backend, False, form=rows.form)
    operands = operands.whole()
    query, key, value = operands.query, operands.key, operands.value
    if operands.absorbed:
        key = expanded_key(operands)
        value = key[..., : operands.latent]  # [s, b, heads, latent]
    if rows.starts is not None and rows.ends is not None:
        out = attend_by_documents(query, key, value, rows.starts, rows.ends, operands.softmax_scale)
        return Attended(operands.up_projected(out.transpose(0, 1)) if operands.absorbed else out.flatten(2))
    # The kernels require values as wide as keys: pad, and cut the output.
    padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))  # [s, b, heads, dim]
    mask = None
    if rows.ends is not None:
        mask = torch.arange(key.shape[0], device=key.device) < rows.ends[:, None]  # [s, keys]
    # [s, b, heads, dim] -> [b, heads, s, dim]
    out = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        padded.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        scale=operands.softmax_scale,
    )[..., : value.shape[-1]]  # [b, heads, s, value_dim]
    if operands.absorbed:
        return Attended(operands.up_projected(out.transpose(1, 2)))  # from [b, s, heads, latent]
    return Attended(out.permute(2, 0, 1, 3).flatten(2))  # [s, b, heads * value_dim]


def all_visible(batch: int, keys: int, device: torch.device, rows: Rows) -> Tensor:
    """Return indices of all visible keys, ascending, -1 at the tail: ``[batch, rows, width]`` int32."""
    position = torch.arange(rows.most_visible(keys), dtype=torch.int32, device=device)  # [width]
    ends = position + 1 if rows.ends is None else rows.ends  # [s]
    if rows.starts is not None:
        position = position + rows.starts[:, None]  # [s, width]
    return position.where(position < ends[:, None], -1).expand(batch, -1, -1)  # [b, s, width]
