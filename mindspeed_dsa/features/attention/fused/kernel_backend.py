"""What Megatron-core 0.19 asks of a DSA kernel backend, on the operators of ``mindspeed_dsa.ops``.

Megatron calls them with its layout, sequence first, and takes ``None`` for "not I": it then asks the next
function, and runs its own PyTorch code at last. ``starts`` and ``ends`` (the keys that each row sees, in the
order of ``k``) cover causal, packed and context parallel rows alike, so what Megatron says of packing beside
them needs no reading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_reduce

from mindspeed_dsa.features.attention.fused import options
from mindspeed_dsa.features.attention.fused.attend import Operands, attend_densely, attend_sparsely
from mindspeed_dsa.features.attention.fused.indexer import IndexInputs, Selection
from mindspeed_dsa.features.attention.fused.kernel_choice import parts
from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss, indexer_kl_loss
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention


def run_fused_qk_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    use_relu: bool = True,
    **layout: Any,
) -> tuple[Tensor, None] | None:
    """Choose the keys of every row.

    Args:
        q: ``[sq, b, index_heads, index_dim]``.
        k: ``[sk, b, index_dim]``.
        weights: ``[sq, b, index_heads]``, every scale included.
        index_topk: keys per row.
        starts: ``[sq]`` int32, first visible key of each row.
        ends: ``[sq]`` int32, one past the last visible key.
        block_size: rows per launch; our operators bound their memory themselves.
        use_relu: whether products are clamped at zero.
        **layout: how Megatron came to ``starts`` and ``ends``.

    Returns:
        ``[b, sq, min(index_topk, sk)]`` int32, ascending, -1 at the tail, and None for the number of valid
        entries, which the -1 say; or None if the fused indexer is switched off.
    """
    if not parts().indexer:
        return None
    return _select(
        IndexInputs.from_host(q, k, weights), index_topk, starts, ends, use_relu
    ).topk_indices, None


def run_fused_qk_topk_with_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    loss_coeff: float,
    pg_collection: Any,
    query_valid_rows: Tensor | None = None,
    calculate_per_token_loss: bool = False,
    use_relu: bool = True,
    **layout: Any,
) -> tuple[Tensor, None, Tensor] | None:
    """Choose the keys of every row, and compute the sparse indexer loss on them.

    Args:
        q: ``[sq, b, index_heads, index_dim]``.
        k: ``[sk, b, index_dim]``.
        weights: ``[sq, b, index_heads]``, every scale included.
        index_topk: keys per row.
        starts: ``[sq]`` int32, first visible key of each row.
        ends: ``[sq]`` int32, one past the last visible key.
        block_size: rows per launch, not needed here.
        query: ``[sq, b, heads, latent + rope]``, this rank's heads in absorbed form.
        key: ``[sk, b, 1, latent + rope]``.
        softmax_scale: factor of the main attention's scores.
        loss_coeff: weight of the loss.
        pg_collection: Megatron's process groups; ``tp`` holds the ranks with the other heads, ``cp`` those
            with the other rows.
        query_valid_rows: ``[b, sq]``, true for rows that count; all by default.
        calculate_per_token_loss: the sum over rows, not their mean.
        use_relu: whether the indexer's products are clamped at zero.
        **layout: how Megatron came to ``starts`` and ``ends``.

    Returns:
        Indices as :func:`run_fused_qk_topk` returns them, None, and the loss, a scalar, under context
        parallelism as :func:`_of_whole_sequence` says; or None if a part is
        switched off or heads have keys of their own.
    """
    if not (parts().indexer and parts().kl_loss) or key.shape[2] != 1:
        return None
    inputs = IndexInputs.from_host(q, k, weights)
    selection = _select(inputs, index_topk, starts, ends, use_relu)
    loss = _sparse_loss(
        selection,
        query,
        key,
        softmax_scale,
        None,
        _row_mask(query_valid_rows),
        calculate_per_token_loss,
        pg_collection,
        use_relu,
    )
    return selection.topk_indices, None, loss * loss_coeff


def run_fused_absorbed_sparse_attention(
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
) -> Tensor | None:
    """Attend to the chosen keys.

    Args:
        query: ``[sq, b, heads, latent + rope]``.
        key: ``[sk, b, 1, latent + rope]``.
        topk_indices: ``[b, sq, topk]`` of any integer type, -1 where there is no key.
        softmax_scale: factor of the scores.
        v_channels: leading part of the key that is the value.
        topk_length: ``[b, sq]``, how many leading entries of a row count; all by default.

    Returns:
        ``[sq, b, heads, v_channels]``; or None if the fused attention is switched off.
    """
    if not parts().attention:
        return None
    if topk_length is not None:
        slot = torch.arange(topk_indices.shape[-1], device=topk_indices.device)
        topk_indices = topk_indices.masked_fill(slot >= topk_length[..., None], -1)
    attended = sparse_flash_attention(
        query.transpose(0, 1),
        key.squeeze(2).transpose(0, 1),
        topk_indices.int(),
        softmax_scale,
        value_dim=v_channels,
        backend=options.current().backend,
    )
    return attended.out.transpose(0, 1)


def run_fused_dsa_attention(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    up_v_weight: Tensor | None,
    q_indexer: Tensor,
    k_indexer: Tensor,
    indexer_weights: Tensor,
    indexer_topk: int,
    softmax_scale: float,
    loss_coeff: float,
    sparse_loss: bool,
    calculate_per_token_loss: bool,
    absorbed_mla: bool,
    attn_mask_type: Any,
    varlen_starts: Tensor | None,
    varlen_ends: Tensor | None,
    key_positions: Tensor | None,
    query_valid_rows: Tensor | None,
    use_relu: bool,
    varlen_is_plain_causal: bool = False,
    pg_collection: Any = None,
    **layout: Any,
) -> tuple[Tensor, Tensor] | None:
    """All of it at once, so that the loss gets its target from the attention; the dense loss is streamed.

    Args:
        query: ``[sq, b, heads, latent + rope]``.
        key: ``[sk, b, 1, latent + rope]``.
        value: None in absorbed form.
        up_v_weight: the value's up-projection ``[heads, value_dim, latent]``.
        q_indexer: ``[sq, b, index_heads, index_dim]``.
        k_indexer: ``[sk, b, index_dim]``.
        indexer_weights: ``[sq, b, index_heads]``, every scale included.
        indexer_topk: keys per row.
        softmax_scale: factor of the main attention's scores.
        loss_coeff: weight of the indexer loss; 0 for none.
        sparse_loss: the loss over the chosen keys, not over all visible ones.
        calculate_per_token_loss: the sum over rows, not their mean.
        absorbed_mla: whether query and key are in absorbed form.
        attn_mask_type: Megatron's.
        varlen_starts: ``[sq]``, first visible key of each row; plain causal rows without it.
        varlen_ends: ``[sq]``, one past the last visible key.
        key_positions: positions of the keys where these are not in order.
        query_valid_rows: ``[b, sq]``, true for rows that count in the loss.
        use_relu: whether the indexer's products are clamped at zero.
        varlen_is_plain_causal: whether the ranges are those of plain causal rows.
        pg_collection: Megatron's process groups.
        **layout: how Megatron came to the ranges.

    Returns:
        ``[sq, b, heads * value_dim]`` and the loss as :func:`run_fused_qk_topk_with_loss` returns it; or None
        if a part is switched off, heads have keys of their own, or ranges do not describe the mask.
    """
    chosen = parts()
    with_loss = loss_coeff > 0 and torch.is_grad_enabled()
    all_ours = chosen.indexer and chosen.attention and (chosen.kl_loss or not with_loss)
    has_ranges = varlen_starts is not None and varlen_ends is not None
    plain = query.shape[0] == key.shape[0] and (varlen_is_plain_causal or not has_ranges)
    if (
        not all_ours
        or not absorbed_mla
        or value is not None
        or up_v_weight is None
        or getattr(attn_mask_type, "name", "") != "causal"
        or key_positions is not None
        or not (plain or has_ranges)
    ):
        return None
    backend = options.current().backend
    operands = Operands(query, key, up_v_weight, softmax_scale)
    starts, ends = (None, None) if plain else (varlen_starts, varlen_ends)
    row_mask = _row_mask(query_valid_rows)
    inputs = IndexInputs.from_host(q_indexer, k_indexer, indexer_weights)

    if plain and query.shape[0] <= indexer_topk:  # every visible key is chosen
        out, sparse_loss = attend_densely(operands, backend).out, False
    else:
        with torch.set_grad_enabled(with_loss):
            selection = _select(inputs, indexer_topk, starts, ends, use_relu)
        attended = attend_sparsely(
            operands, selection.topk_indices, backend, with_sum=with_loss and sparse_loss
        )
        out = attended.out
    if not with_loss:
        return out, out.new_zeros((), dtype=torch.float32)
    if sparse_loss:
        loss = _sparse_loss(
            selection,
            query,
            key,
            softmax_scale,
            attended.attention_sum,
            row_mask,
            calculate_per_token_loss,
            pg_collection,
            use_relu,
        )
    else:
        loss = dense_indexer_kl_loss(
            inputs.query,
            inputs.key,
            inputs.weights,
            query.detach().transpose(0, 1),
            key.detach().squeeze(2).transpose(0, 1),
            softmax_scale,
            starts=starts,
            ends=ends,
            row_mask=row_mask,
            reduction=_reduction(calculate_per_token_loss, pg_collection),
            tp_group=_ranks(pg_collection, "tp"),
            use_relu=use_relu,
            backend=backend,
        )
        loss = _of_whole_sequence(loss, query, row_mask, calculate_per_token_loss, pg_collection)
    return out, loss * loss_coeff


def _select(
    inputs: IndexInputs, topk: int, starts: Tensor | None, ends: Tensor | None, use_relu: bool
) -> Selection:
    topk_indices, topk_scores = lightning_indexer(
        inputs.query,
        inputs.key,
        inputs.weights,
        topk,
        starts=starts,
        ends=ends,
        use_relu=use_relu,
        backend=options.current().backend,
    )
    return Selection(topk_indices, topk_scores, inputs)


def _sparse_loss(
    selection: Selection,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    attention_sum: Tensor | None,
    row_mask: Tensor | None,
    per_token: bool,
    pg_collection: Any,
    use_relu: bool,
) -> Tensor:
    inputs = selection.inputs
    loss = indexer_kl_loss(
        inputs.query,
        inputs.key,
        inputs.weights,
        query.detach().transpose(0, 1),
        key.detach().squeeze(2).transpose(0, 1),
        selection.topk_indices,
        softmax_scale,
        topk_scores=selection.topk_scores,
        attention_sum=attention_sum,
        row_mask=row_mask,
        reduction=_reduction(per_token, pg_collection),
        tp_group=_ranks(pg_collection, "tp"),
        use_relu=use_relu,
        backend=options.current().backend,
    )
    return _of_whole_sequence(loss, query, row_mask, per_token, pg_collection)


def _reduction(per_token: bool, pg_collection: Any) -> str:
    """How the operators reduce over rows, for :func:`_of_whole_sequence`."""
    return "sum" if per_token or _ranks(pg_collection, "cp") is not None else "mean"


def _of_whole_sequence(
    loss: Tensor, query: Tensor, row_mask: Tensor | None, per_token: bool, pg_collection: Any
) -> Tensor:
    """The mean over the whole sequence from a context parallel rank's sum over its rows.

    Megatron multiplies the loss's gradient by the number of ranks and averages what it logs over them. So the
    gradient is that of the rank's sum divided by all ranks' rows that count, and the value is that many times
    the ranks. A sum for the per-token loss is returned as it is, and so is a mean where there is one rank.

    Args:
        loss: scalar, reduced as :func:`_reduction` says.
        query: ``[sq, b, ...]``.
        row_mask: ``[b, sq]`` bool, True for rows that count; all by default.
        per_token: whether Megatron divides by tokens when all gradients are there.
        pg_collection: Megatron's process groups.
    """
    group = _ranks(pg_collection, "cp")
    if per_token or group is None:
        return loss
    if row_mask is None:
        return _ShareOfGradient.apply(loss / (query.shape[0] * query.shape[1]), group.size())  # type: ignore[no-any-return]
    # Padding is not spread evenly over ranks.
    count = row_mask.sum(dtype=loss.dtype)
    all_reduce(count, group=group)
    return _ShareOfGradient.apply(loss * group.size() / count.clamp_min(1), group.size())  # type: ignore[no-any-return]


class _ShareOfGradient(torch.autograd.Function):
    """Identity; in backward the gradient is divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def _row_mask(query_valid_rows: Tensor | None) -> Tensor | None:
    return None if query_valid_rows is None else query_valid_rows.bool()


def _ranks(pg_collection: Any, name: str) -> ProcessGroup | None:
    """The tensor parallel ranks, which hold the other heads, or the context parallel ones; None for one."""
    group: ProcessGroup | None = getattr(pg_collection, name, None)
    return group if group is not None and group.size() > 1 else None
