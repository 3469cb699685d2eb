"""Indexer loss on Ascend NPUs: torch_npu's fused losses, or PyTorch in chunks for other calls.

The fused operators return the loss summed over all rows, and the gradients of that sum. For a mean, both are
multiplied with 1 / (number of rows in the whole batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.indexer_kl_loss.chunked import attention_sum as attention_sum
from mindspeed_dsa.ops.indexer_kl_loss.chunked import divergence_and_gradient as divergence_and_gradient
from mindspeed_dsa.ops.indexer_kl_loss.protocol import DenseCall, SparseCall
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
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.ops.row_ranges import RowForm

_SPARSE = "npu_sparse_lightning_indexer_grad_kl_loss"
_DENSE_LSE = "npu_dense_lightning_indexer_softmax_lse"
_DENSE = "npu_dense_lightning_indexer_grad_kl_loss"

_LATENT, _NOPE, _ROPE = 512, 128, 64
_INDEX_DIM = 128
# The manual lists 32 heads for both forms; one of CANN's tilings of the sparse form lacks them.
_SPARSE_HEADS, _DENSE_HEADS = (64, 128), (32, 64, 128)
_DENSE_INDEX_HEADS = (8, 16, 32, 64)
_MOST_SEQUENCES = 256
_LONGEST_DENSE_QUERY = 32 * 1024
# Limits of the sparse form in the manual. Sequences with more rows are cut into several calls.
_LONGEST_QUERY, _LONGEST_KEY = 8 * 1024, 128 * 1024
# Bytes for the main attention's scores of a chunk in the dense form, and for the tensors derived from them.
_LSE_BYTES = 256 << 20

KIND: Literal["fused"] = "fused"


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None; ``topk`` is 0 for the dense form."""
    if shape["topk"] > 0:
        # PyTorch computes calls that the fused operator does not take: see plan_fused.
        return unavailable(shape.device, _SPARSE)
    reason = unavailable(shape.device, _DENSE_LSE, _DENSE)
    if reason is not None:
        return reason
    if shape.dtype not in DTYPES:
        return f"{_DENSE} takes bfloat16 and float16 only"
    if shape["key_heads"] != shape["heads"]:
        return f"{_DENSE} takes a key for every head, that is, MLA that is not absorbed"
    if shape["dim"] != _NOPE + _ROPE:
        return f"{_DENSE} takes heads of {_NOPE} + {_ROPE} dimensions only, and these have {shape['dim']}"
    return _unsupported_indexer(_DENSE, shape["index_heads"], shape["index_dim"], _DENSE_INDEX_HEADS)


def plan_fused(call: SparseCall, form: RowForm | None) -> Layout | str:
    """Return the layout for the sparse loss operator, or why the operator cannot take the call."""
    query, topk_indices = call.attention.query, call.attention.topk_indices
    key_length = call.index.key.shape[1]
    if query.dtype not in DTYPES or call.index.query.dtype != query.dtype:
        return f"{_SPARSE} takes bfloat16 and float16, one of them for all inputs"
    if call.attention.sink is not None:
        return f"{_SPARSE} has no sink"
    if call.attention.value_dim != _LATENT + _ROPE:
        return f"{_SPARSE} has {_LATENT} latent and {_ROPE} rotary dimensions only"
    index_heads, index_dim = call.index.query.shape[2:]
    reason = _unsupported_indexer(_SPARSE, index_heads, index_dim, product().loss_index_heads)
    if reason is not None:
        return reason
    reason = unsupported_width(_SPARSE, topk_indices.shape[2], key_length)
    if reason is not None:
        return reason
    if call.lse is None:
        return f"{_SPARSE} needs the lse of the attention"
    if call.row_mask is not None:
        return f"{_SPARSE} sums over all rows (row_mask must be None)"
    if torch.are_deterministic_algorithms_enabled():
        return f"{_SPARSE} adds to keys in no fixed order"
    reason = _unsupported_heads(_SPARSE, call, query, _SPARSE_HEADS)
    if reason is not None:
        return reason
    layout = layout_of_selection("indexer_kl_loss", topk_indices, key_length, form)
    if isinstance(layout, str):
        return layout
    # Packed sequences may be split over several calls, so that their number is not limited.
    batch = layout.batch if layout.sequences is None else 1
    longest = layout.key_length if layout.sequences is None else max(layout.sequences)
    if batch > product().loss_sequences or longest > _LONGEST_KEY:
        return f"{_SPARSE} takes up to {product().loss_sequences} sequences of up to {_LONGEST_KEY} keys"
    return layout


def plan_dense(call: DenseCall, row_mask: Tensor | None) -> Layout | str:
    """Return the layout for the dense loss operator, or why the operator cannot take the call."""
    if call.index.query.dtype != call.query.dtype:
        return f"{_DENSE} takes bfloat16 and float16, one of them for all inputs"
    if call.sink is not None:
        return f"{_DENSE} has no sink"
    if row_mask is not None:
        return f"{_DENSE} sums over all rows (row_mask must be None)"
    reason = _unsupported_heads(_DENSE, call, call.query, _DENSE_HEADS)
    if reason is not None:
        return reason
    layout = layout_of_ranges(call.ranges, call.key.shape[1])
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
    operator: str, call: SparseCall | DenseCall, query: Tensor, known: tuple[int, ...]
) -> str | None:
    if not call.index.use_relu:
        return f"{operator} always clamps the products at zero (use_relu=True)"
    if query.shape[2] * _ranks(call.tp_group) not in known:
        return f"{operator} takes {listed(known)} heads, counted over all tensor-parallel ranks"
    return None


def fused_loss(call: SparseCall, row_weight: Tensor) -> Tensor:
    """Return the loss over selected keys, differentiable with respect to the indexer's three inputs.

    The target needs all heads: other ranks' heads are gathered, and every rank computes the whole target.

    Args:
        call: arguments with an ``lse``, and with the layout that :func:`plan_fused` returned as the
            attention's plan. The weights of index heads are rounded to the dtype of the query.
        row_weight: scalar, factor of every row's divergence.
    """
    assert call.lse is not None
    attention = call.attention
    layout: Layout = attention.plan
    query = _all_heads(attention.query.detach(), call.tp_group)
    if attention.query_rope is None:
        query_latent, query_rope = _split(layout, query, _LATENT)
    else:
        rope = _all_heads(attention.query_rope.detach(), call.tp_group)
        query_latent, query_rope = layout.pack(query), layout.pack(rope)
    latent = attention.key_value.detach()[:, :, None]  # [batch, key_length, 1, dim]
    if attention.key_rope is None:
        latent, key_rope = _split(layout, latent, _LATENT)
    else:
        latent, key_rope = layout.pack(latent), layout.pack(attention.key_rope.detach()[:, :, None])
    maximum = layout.pack_statistics(_all_heads(call.lse.detach(), call.tp_group))
    indices = layout.pack_widened(attention.topk_indices, TOPK_WIDTHS[0])
    # Axis of the rows in packed tensors: [batch, rows, ...] or [rows, ...]. Statistics have one more axis,
    # the heads, before it.
    axis = 1 if layout.sequences is None else 0

    def run_part(part: Part, index_query: Tensor, index_key: Tensor, index_weights: Tensor) -> list[Tensor]:
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
            attention.softmax_scale,
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
        results = [run_part(part, index_query, index_key, index_weights) for part in parts]
        if len(results) == 1:
            return results[0]
        queries, _, weights, losses = zip(*results, strict=True)
        # A key may be visible in several parts: add their gradients in fp32.
        of_key = torch.zeros_like(index_key, dtype=torch.float32)
        for part, (_, gradient, _, _) in zip(parts, results, strict=True):
            of_key.narrow(axis, part.keys.start, part.keys.stop - part.keys.start).add_(gradient)
        return [
            torch.cat(queries, dim=axis),
            of_key.to(index_key.dtype),
            torch.cat(weights, dim=axis),
            torch.stack(losses).sum(0),
        ]

    index = call.index
    weights = index.weights.to(query_latent.dtype)
    loss: Tensor = _Fused.apply(run, layout, row_weight, index.query, index.key, weights)
    return loss


def dense_loss(call: DenseCall) -> Tensor:
    """Return the loss over all visible keys, differentiable with respect to the indexer's three inputs.

    The operator needs the main attention's softmax statistics, which callers do not have: they are computed
    in chunks. All rows have the same weight.
    """
    layout: Layout = call.plan
    query, key, tp_group = call.query, call.key, call.tp_group
    lse = dense_lse(call)
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
            call.softmax_scale,
            query_rope=query_rope,
            key_rope=key_rope,
            **rows,
        )

    weights = call.index.weights
    if weights.dtype not in (torch.float32, query.dtype):
        weights = weights.to(query.dtype)
    row_weight = call.row_weights[0, 0]
    loss: Tensor = _Fused.apply(run, layout, row_weight, call.index.query, call.index.key, weights)
    return loss


def dense_lse(call: DenseCall) -> Tensor:
    """Return the log-sum-exp of the main attention over all visible keys, computed in chunks.

    Its shape is ``[batch, query_length, heads]``, in fp32.
    """
    query, key, starts, ends = call.query, call.key, call.ranges.starts, call.ranges.ends
    batch, length, heads, _ = query.shape
    dtype, keys = wide(query.dtype), key.shape[1]
    position = torch.arange(keys, device=query.device)
    lse = torch.empty(batch, length, heads, dtype=dtype, device=query.device)
    rows = max(1, _LSE_BYTES // max(1, 3 * heads * keys * dtype.itemsize))
    for b in range(batch):
        transposed = key[b].permute(1, 2, 0).to(dtype)  # [heads, dim, keys]
        for first in range(0, length, rows):
            place = (b, slice(first, first + rows))
            # [heads, rows, dim] @ [heads, dim, keys] -> [heads, rows, keys]
            scores = torch.bmm((query[place].to(dtype) * call.softmax_scale).transpose(0, 1), transposed)
            hidden = (position < starts[place][:, None]) | (position >= ends[place][:, None])  # [rows, keys]
            lse[place] = scores.masked_fill_(hidden, -torch.inf).logsumexp(dim=-1).t()  # [rows, heads]
    return lse


class _Fused(torch.autograd.Function):
    """Autograd function around a fused operator, whose forward returns both the loss and the gradients."""

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
        # Both factors are applied at once in fp32, because 16-bit gradients of a mean over many rows would
        # underflow.
        factor = grad_loss.float() * row_weight
        grad_query, grad_key, grad_weights = (
            ctx.layout.unpack((gradient.float() * factor).to(gradient.dtype)) for gradient in gradients
        )
        # key: [batch, key_length, index_dim]
        return None, None, None, grad_query, grad_key.squeeze(2), grad_weights


def _split(layout: Layout, tensor: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Split the last axis at ``width`` into latent and rotary dimensions, and pack both for the operator."""
    first, rope = tensor.split([width, _ROPE], dim=-1)  # [..., width], [..., rope]
    return layout.pack(first), layout.pack(rope)


def _ranks(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _all_heads(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather ``[batch, length, heads, ...]`` of all ranks of the group, concatenated along ``heads``."""
    if _ranks(group) == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(_ranks(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=2)  # [batch, length, ranks * heads, ...]


# The sparse operator limits the length of sequences. The loss is a sum over rows, so the rows may be split
# over any number of calls. Each part of a long sequence has the keys up to its own end: the operator requires
# that the last row sees the last key.


@dataclass(frozen=True)
class Part:
    """Query rows and keys of one call of the sparse loss operator, as slices of packed tensors."""

    rows: slice
    keys: slice
    ends: list[int] | None = None
    """Ends of the part's sequences, counted from its first row (TND); None for an unpacked batch (BSND)."""
    alone: bool = False
    """Whether the part is cut out of a packed sequence, and is a batch of one."""

    def of(self, tensor: Tensor, axis: int, places: slice) -> Tensor:
        """Return the part's rows or keys of a packed tensor, contiguous.

        Args:
            tensor: packed tensor.
            axis: axis of the rows or keys.
            places: :attr:`rows` or :attr:`keys`.
        """
        piece = tensor.narrow(axis, places.start, places.stop - places.start)
        return (piece[None] if self.alone else piece).contiguous()


def parts_of(layout: Layout, longest: int, most: int) -> list[Part]:
    """Split the batch into operator calls, in row order.

    Args:
        layout: layout of the whole batch.
        longest: maximum number of rows of a sequence per call.
        most: maximum number of sequences per call.
    """
    if layout.sequences is None:
        shift = layout.key_length - layout.query_length
        cuts = _cuts(layout.query_length, longest)
        return [Part(slice(first, end), slice(0, end + shift)) for first, end in cuts]
    return list(_of_sequences(layout.sequences, longest, most))


def _of_sequences(lengths: tuple[int, ...], longest: int, most: int) -> Iterator[Part]:
    together: list[int] = []
    begin = 0  # first row of the sequences in `together`
    for length in (*lengths, None):
        if together and (length is None or length > longest or len(together) == most):
            rows = slice(begin, begin + sum(together))
            yield Part(rows, rows, ends=list(accumulate(together)))
            begin, together = rows.stop, []
        if length is not None and length > longest:
            for first, end in _cuts(length, longest):
                yield Part(slice(begin + first, begin + end), slice(begin, begin + end), alone=True)
            begin += length
        elif length is not None:
            together.append(length)


def _cuts(length: int, longest: int) -> list[tuple[int, int]]:
    return [(first, min(first + longest, length)) for first in range(0, length, longest)]
