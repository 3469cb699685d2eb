"""Checks of both forms' arguments, the weights of rows, and the sum over the heads of other ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.checks import check_float, check_heads, check_shape, check_weights, require

OPERATOR = "indexer_kl_loss"


def check_inputs(
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    query: Tensor,
    key: Tensor,
    may_have_heads: bool,
) -> tuple[int, int]:
    """Check what both forms share; ``key`` has an axis of heads if it may and does.

    Returns:
        ``(batch, query_length)``.
    """
    check_shape(OPERATOR, "query", query, (None,) * 4, "[batch, query_length, heads, dim]")
    check_heads(OPERATOR, "query", query)
    batch, query_length, heads, dim = query.shape
    tail = (heads, dim) if may_have_heads and key.dim() == 4 else (dim,)
    check_shape(
        OPERATOR, "key", key, (batch, None, *tail), f"[{batch}, key_length, {', '.join(map(str, tail))}]"
    )
    check_shape(
        OPERATOR,
        "index_query",
        index_query,
        (batch, query_length, None, None),
        f"[{batch}, {query_length}, index_heads, index_dim]",
    )
    check_heads(OPERATOR, "index_query", index_query)
    index_heads, index_dim = index_query.shape[2:]
    check_shape(
        OPERATOR, "index_key", index_key, (batch, None, index_dim), f"[{batch}, key_length, {index_dim}]"
    )
    require(
        index_key.shape[1] == key.shape[1],
        OPERATOR,
        f"index_key has {index_key.shape[1]} keys and key has {key.shape[1]}; both list the same positions",
    )
    check_shape(
        OPERATOR,
        "index_weights",
        index_weights,
        (batch, query_length, index_heads),
        f"[{batch}, {query_length}, {index_heads}]",
    )
    check_float(OPERATOR, query=query, key=key)
    check_float(OPERATOR, index_query=index_query, index_key=index_key)
    check_weights(OPERATOR, "index_weights", index_weights, index_query)
    require(
        index_query.device == query.device,
        OPERATOR,
        f"index_query ({index_query.device}) and query ({query.device}) must be on one device",
    )
    return batch, query_length


def check_supplied(
    topk_indices: Tensor, heads: int, per_head: Tensor | None, **per_entry: Tensor | None
) -> None:
    """Check what a caller brings from the attention and the indexer: ``lse``, and one number an entry."""
    batch, query_length, topk = topk_indices.shape
    shapes = [("lse", per_head, (batch, query_length, heads))]
    shapes += [(name, tensor, (batch, query_length, topk)) for name, tensor in per_entry.items()]
    for name, tensor, shape in shapes:
        if tensor is not None:
            check_shape(OPERATOR, name, tensor, shape, str(list(shape)))
            device = topk_indices.device
            require(
                tensor.is_floating_point() and tensor.device == device,
                OPERATOR,
                f"{name} must be floating point on {device}, got {tensor.dtype} on {tensor.device}",
            )


def row_weights_of(rows: tuple[int, int], row_mask: Tensor | None, reduction: str, like: Tensor) -> Tensor:
    """Return ``[batch, query_length]``: what each row's divergence is multiplied with in the loss."""
    require(reduction in ("mean", "sum"), OPERATOR, f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if row_mask is None:
        weights = like.new_ones(rows)
    else:
        require(
            row_mask.shape == rows and row_mask.dtype == torch.bool,
            OPERATOR,
            f"row_mask must be bool {list(rows)}, got {row_mask.dtype} {list(row_mask.shape)}",
        )
        weights = row_mask.to(dtype=like.dtype, device=like.device)
    # Without a row that counts the loss is zero, not 0/0.
    return weights / weights.sum().clamp_min(1) if reduction == "mean" else weights


def shape_class(index_query: Tensor, query: Tensor, topk: int, key_heads: int = 1) -> ShapeClass:
    """Return what a backend is chosen by; ``topk`` 0 stands for the dense form."""
    sizes = (
        ("heads", query.shape[2]),
        ("dim", query.shape[3]),
        ("key_heads", key_heads),
        ("index_heads", index_query.shape[2]),
        ("index_dim", index_query.shape[3]),
        ("topk", topk),
    )
    return ShapeClass.of(query, *sizes)


def shape_of_entries(topk_scores: Tensor) -> ShapeClass:
    """Return what a backend is chosen by for a call that has nothing but entries: all other sizes are 1."""
    names = ("heads", "dim", "key_heads", "index_heads", "index_dim")
    return ShapeClass.of(topk_scores, *((name, 1) for name in names), ("topk", topk_scores.shape[2]))


def over_ranks(attention_sum: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over the heads of all ranks; the caller's tensor stays as it is."""
    attention_sum = attention_sum.detach()
    if tp_group is not None:
        attention_sum = attention_sum.clone()
        dist.all_reduce(attention_sum, group=tp_group)
    return attention_sum
