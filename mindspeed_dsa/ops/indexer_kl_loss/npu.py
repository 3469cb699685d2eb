"""Indexer loss on Ascend NPUs: torch_npu's fused losses, and PyTorch in chunks for what they do not take.

The fused operators return the sum of the loss over all rows and the gradients of that sum, in one call. The
factor that makes a mean of it is that of all rows of the batch, not of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops import chunks
from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.chunks import attention_sum as attention_sum
from mindspeed_dsa.ops.indexer_kl_loss.divergence import divergence_and_gradient as divergence_and_gradient
from mindspeed_dsa.ops.indexer_kl_loss.npu_parts import Part, parts_of
from mindspeed_dsa.ops.npu.device import (
    DTYPES,
    TOPK_WIDTHS,
    listed,
    npu_op,
    product,
    unavailable,
    unsupported_width,
)
from mindspeed_dsa.ops.npu.layout import Layout, layout_of_ranges, layout_of_selection
from mindspeed_dsa.ops.row_ranges import Ranges, RowForm

_SPARSE = "npu_sparse_lightning_indexer_grad_kl_loss"
_DENSE_LSE = "npu_dense_lightning_indexer_softmax_lse"
_DENSE = "npu_dense_lightning_indexer_grad_kl_loss"

_LATENT, _NOPE, _ROPE = 512, 128, 64
_INDEX_DIM = 128
# The manual lists 32 heads for both; a tiling of CANN's for the sparse form does not have them.
_SPARSE_HEADS, _DENSE_HEADS = (64, 128), (32, 64, 128)
_DENSE_INDEX_HEADS = (8, 16, 32, 64)
_MOST_SEQUENCES = 256
_LONGEST_DENSE_QUERY = 32 * 1024
# The manual's of the sparse form: longer sequences are cut into calls.
_LONGEST_QUERY, _LONGEST_KEY = 8 * 1024, 128 * 1024

KIND: Literal["fused"] = "fused"


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None; ``topk`` is 0 for the dense form."""
    if shape["topk"] > 0:
        # What the fused operator does not take, PyTorch computes: see plan_fused.
        return unavailable(shape.device, _SPARSE)
    reason = unavailable(shape.device, _DENSE_LSE, _DENSE)
    if reason is not None:
        return reason
    if shape.dtype not in DTYPES:
        return f"{_DENSE} takes bfloat16 and float16 only"
    if shape["key_heads"] != shape["heads"] or shape["dim"] != _NOPE + _ROPE:
        return (
            f"{_DENSE} takes a key for every head, with {_NOPE} + {_ROPE} dimensions, that is, MLA that is "
            "not absorbed"
        )
    return _unsupported_indexer(_DENSE, shape["index_heads"], shape["index_dim"], _DENSE_INDEX_HEADS)


def plan_fused(
    index_query: Tensor,
    query: Tensor,
    topk_indices: Tensor,
    key_length: int,
    lse: Tensor | None,
    row_mask: Tensor | None,
    tp_group: dist.ProcessGroup | None,
    use_relu: bool,
    form: RowForm | None,
) -> Layout | str:
    """The layout of a call for the fused operator of the sparse form, or why it cannot take the call."""
    if query.dtype not in DTYPES or index_query.dtype != query.dtype:
        return f"{_SPARSE} takes bfloat16 and float16, one of them for all inputs"
    if query.shape[3] != _LATENT + _ROPE:
        return f"{_SPARSE} has {_LATENT} latent and {_ROPE} rotary dimensions only"
    index_heads, index_dim = index_query.shape[2:]
    reason = _unsupported_indexer(_SPARSE, index_heads, index_dim, product().loss_index_heads)
    if reason is not None:
        return reason
    reason = unsupported_width(_SPARSE, topk_indices.shape[2], key_length)
    if reason is not None:
        return reason
    if lse is None:
        return f"{_SPARSE} needs the lse of the attention"
    if row_mask is not None:
        return f"{_SPARSE} sums over all rows (row_mask must be None)"
    if torch.are_deterministic_algorithms_enabled():
        return f"{_SPARSE} adds to keys in no fixed order"
    reason = _unsupported_heads(_SPARSE, query, tp_group, use_relu, _SPARSE_HEADS)
    if reason is not None:
        return reason
    layout = layout_of_selection("indexer_kl_loss", topk_indices, key_length, form)
    if isinstance(layout, str):
        return layout
    # Packed sequences go in as many calls as it takes.
    batch = layout.batch if layout.sequences is None else 1
    longest = layout.key_length if layout.sequences is None else max(layout.sequences)
    if batch > product().loss_sequences or longest > _LONGEST_KEY:
        return f"{_SPARSE} takes up to {product().loss_sequences} sequences of up to {_LONGEST_KEY} keys"
    return layout


def plan_dense(
    index_query: Tensor,
    query: Tensor,
    ranges: Ranges,
    key_length: int,
    row_mask: Tensor | None,
    tp_group: dist.ProcessGroup | None,
    use_relu: bool,
) -> Layout | str:
    """The layout of a call of the dense form whose shape this backend takes, or why it cannot take it."""
    if index_query.dtype != query.dtype:
        return f"{_DENSE} takes bfloat16 and float16, one of them for all inputs"
    if row_mask is not None:
        return f"{_DENSE} sums over all rows (row_mask must be None)"
    reason = _unsupported_heads(_DENSE, query, tp_group, use_relu, _DENSE_HEADS)
    if reason is not None:
        return reason
    layout = layout_of_ranges(ranges, key_length)
    if isinstance(layout, str):
        return layout
    sequences = layout.batch if layout.sequences is None else len(layout.sequences)
    longest = layout.query_length if layout.sequences is None else max(layout.sequences)
    if sequences > _MOST_SEQUENCES or longest > _LONGEST_DENSE_QUERY:
        return f"{_DENSE} takes up to {_MOST_SEQUENCES} sequences of up to {_LONGEST_DENSE_QUERY} rows"
    return layout


def _unsupported_indexer(operator: str, heads: int, dim: int, known: tuple[int, ...]) -> str | None:
    if dim != _INDEX_DIM:
        return f"{operator} has index_dim {_INDEX_DIM} only"
    if heads not in known:
        return f"{operator} takes {listed(known)} index heads"
    return None


def _unsupported_heads(
    operator: str, query: Tensor, group: dist.ProcessGroup | None, use_relu: bool, known: tuple[int, ...]
) -> str | None:
    if not use_relu:
        return f"{operator} always clamps the products at zero (use_relu=True)"
    if query.shape[2] * _ranks(group) not in known:
        return f"{operator} takes {listed(known)} heads, counted over all tensor-parallel ranks"
    return None


def fused_loss(
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    query_parts: tuple[Tensor, ...],
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    lse: Tensor,
    row_weight: Tensor,
    tp_group: dist.ProcessGroup | None,
    layout: Layout,
) -> Tensor:
    """The sparse form, differentiable with respect to the indexer's three inputs.

    The target needs all heads: those of the other ranks are gathered, and each rank computes all of it.

    Args:
        index_query: ``[batch, query_length, index_heads, 128]``.
        index_key: ``[batch, key_length, 128]``.
        index_weights: ``[batch, query_length, index_heads]``; rounded to the dtype of the query.
        query_parts: ``[batch, query_length, heads, 576]``, this rank's heads, or the 512 and the 64 apart.
        key: ``[batch, key_length, 576]``.
        topk_indices: ``[batch, query_length, topk]``.
        softmax_scale: factor of the main attention's scores.
        lse: ``[batch, query_length, heads]`` of the attention over the same keys.
        row_weight: scalar, what every row's divergence is multiplied with.
        tp_group: tensor-parallel process group whose ranks hold the other heads.
        layout: what :func:`plan_fused` returned.
    """
    gathered = [_all_heads(part.detach(), tp_group) for part in query_parts]
    if len(gathered) == 1:
        query_latent, query_rope = _split(layout, gathered[0], _LATENT)
    else:
        query_latent, query_rope = map(layout.pack, gathered)
    latent, key_rope = _split(layout, key.detach()[:, :, None], _LATENT)
    maximum = layout.pack_statistics(_all_heads(lse.detach(), tp_group))
    indices = layout.pack_widened(topk_indices, TOPK_WIDTHS[0])
    # The rows of packed tensors; statistics have heads before them.
    axis = 1 if layout.sequences is None else 0

    def call(part: Part, index_query: Tensor, index_key: Tensor, index_weights: Tensor) -> list[Tensor]:
        def rows(tensor: Tensor, axis: int = axis) -> Tensor:
            return part.of(tensor, axis, part.rows)

        def keys(tensor: Tensor) -> Tensor:
            return part.of(tensor, axis, part.keys)

        statistics = rows(maximum, axis + 1)
        results = npu_op(_SPARSE)(
            rows(query_latent),
            keys(latent),
            rows(index_query),
            keys(index_key),
            rows(index_weights),
            rows(indices),
            statistics,
            torch.ones_like(statistics),
            softmax_scale,
            query_rope=rows(query_rope),
            key_rope=keys(key_rope),
            actual_seq_qlen=part.ends,
            actual_seq_klen=part.ends,
            layout="BSND" if part.ends is None else "TND",
            sparse_mode=3,
        )
        *gradients, loss = results[:4]
        return [*(gradient[0] if part.alone else gradient for gradient in gradients), loss]

    def run(index_query: Tensor, index_key: Tensor, index_weights: Tensor) -> list[Tensor]:
        parts = parts_of(layout, _LONGEST_QUERY, product().loss_sequences)
        found = [call(part, index_query, index_key, index_weights) for part in parts]
        if len(found) == 1:
            return found[0]
        of_query, _, of_weights = (torch.cat(each, dim=axis) for each in list(zip(*found, strict=True))[:3])
        # A key may be seen from several parts.
        of_key = torch.zeros_like(index_key, dtype=torch.float32)
        for part, (_, gradient, _, _) in zip(parts, found, strict=True):
            of_key.narrow(axis, part.keys.start, part.keys.stop - part.keys.start).add_(gradient)
        return [
            of_query,
            of_key.to(index_key.dtype),
            of_weights,
            torch.stack([one[3] for one in found]).sum(0),
        ]

    weights = index_weights.to(query_latent.dtype)
    loss: Tensor = _Fused.apply(run, layout, row_weight, index_query, index_key, weights)
    return loss


def dense_loss(
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    starts: Tensor,
    ends: Tensor,
    row_weights: Tensor,
    tp_group: dist.ProcessGroup | None,
    use_relu: bool,
    layout: Layout,
) -> Tensor:
    """The dense form, differentiable with respect to the indexer's three inputs.

    The operator wants the main attention's softmax statistics, which no caller has: they are computed in
    chunks. ``row_weights`` is the same for all rows.
    """
    lse = chunks.dense_lse(query, key, softmax_scale, starts, ends)
    query_nope, query_rope = _split(layout, _all_heads(query, tp_group), _NOPE)
    key_nope, key_rope = _split(layout, _all_heads(key, tp_group), _NOPE)
    maximum = layout.pack_heads_first(_all_heads(lse, tp_group))
    rows: dict[str, Any] = {
        "actual_seq_qlen": layout.prefix_sums,
        "actual_seq_klen": layout.prefix_sums,
        "layout": layout.name,
        "sparse_mode": 3,
    }

    def run(index_query: Tensor, index_key: Tensor, index_weights: Tensor) -> tuple[Tensor, ...]:
        index_maximum, index_sum = npu_op(_DENSE_LSE)(index_query, index_key, index_weights, **rows)
        return npu_op(_DENSE)(
            query_nope,
            key_nope,
            index_query,
            index_key,
            index_weights,
            maximum,
            torch.ones_like(maximum),
            index_maximum,
            index_sum,
            softmax_scale,
            query_rope=query_rope,
            key_rope=key_rope,
            **rows,
        )

    if index_weights.dtype not in (torch.float32, query.dtype):
        index_weights = index_weights.to(query.dtype)
    loss: Tensor = _Fused.apply(run, layout, row_weights[0, 0], index_query, index_key, index_weights)
    return loss


class _Fused(torch.autograd.Function):
    """An operator that returns the gradients of the indexer's inputs and the loss, both summed over rows."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]],
        layout: Layout,
        row_weight: Tensor,
        index_query: Tensor,
        index_key: Tensor,
        index_weights: Tensor,
    ) -> Tensor:
        *gradients, loss = run(
            layout.pack(index_query), layout.pack(index_key[:, :, None]), layout.pack(index_weights)
        )
        ctx.layout = layout
        ctx.save_for_backward(row_weight, *gradients)
        return loss[0] * row_weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Any, ...]:
        row_weight, *gradients = ctx.saved_tensors
        # In fp32, and both factors at once: 16-bit gradients of a mean over many rows would vanish.
        factor = grad_loss.float() * row_weight
        grad_query, grad_key, grad_weights = (
            ctx.layout.unpack((gradient.float() * factor).to(gradient.dtype)) for gradient in gradients
        )
        return None, None, None, grad_query, grad_key.squeeze(2), grad_weights


def _split(layout: Layout, tensor: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first ``width`` dimensions and the rotary rest, packed."""
    first, rope = tensor.split([width, _ROPE], dim=-1)
    return layout.pack(first), layout.pack(rope)


def _ranks(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _all_heads(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``[batch, length, heads, ...]`` of all ranks of the group, one after the other in ``heads``."""
    if _ranks(group) == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(_ranks(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=2)
