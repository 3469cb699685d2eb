"""Lightning Indexer on Ascend NPUs with torch_npu's operators for selection and gradient."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa import log
from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.checks import names_key
from mindspeed_dsa.ops.lightning_indexer import chunked
from mindspeed_dsa.ops.lightning_indexer.chunked import (
    scores_at as scores_at,  # torch_npu has no operator for it
)
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.npu.device import DTYPES, TOPK_WIDTHS, listed, npu_op, product, unavailable
from mindspeed_dsa.ops.npu.layout import Layout, layout_of_indices, layout_of_ranges
from mindspeed_dsa.ops.precision import raising_factor
from mindspeed_dsa.ops.row_ranges import Ranges
from mindspeed_dsa.platforms.npu_operators import INDEXER_GRADIENT_HEADS, INDEXER_GRADIENT_TOPK

_log = log.get("ops")
_HEAD_DIM = 128
_MOST_HEADS = 64
# npu_lightning_indexer takes every width up to this, and above it the widths shared by all operators.
_ANY_TOPK = 2048
_GRAD = "npu_lightning_indexer_grad"
_GRAD_HEADS, _GRAD_TOPK = INDEXER_GRADIENT_HEADS, INDEXER_GRADIENT_TOPK
# fp32 represents positions up to this exactly. The device sorts fp32 on its vector units, but integers on its
# few processor cores.
_EXACT_IN_FP32 = 2**24

KIND: Literal["gradients"] = "gradients"


class Plan(NamedTuple):
    """Layout and sort order of a call, determined once and used by its forward and backward."""

    layout: Layout
    in_order: bool


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    reason = unavailable(shape.device, "npu_lightning_indexer", _GRAD)
    if reason is not None:
        return reason
    if shape.dtype not in DTYPES:
        return "npu_lightning_indexer takes bfloat16 and float16 only"
    if shape["head_dim"] != _HEAD_DIM:
        return f"npu_lightning_indexer has head_dim {_HEAD_DIM} only"
    if shape["heads"] > _MOST_HEADS:
        return f"npu_lightning_indexer takes at most {_MOST_HEADS} heads"
    if shape["heads"] not in product().indexer_heads:
        heads = listed(product().indexer_heads)
        return f"npu_lightning_indexer takes {heads} heads on this device, {product().name}"
    if shape["topk"] > _ANY_TOPK and shape["topk"] not in TOPK_WIDTHS:
        return f"npu_lightning_indexer takes topk up to {_ANY_TOPK} and multiples of 1024 up to 8192"
    return None


def plan_call(call: IndexerCall, topk: int, ranges: Ranges, in_order: bool) -> Plan | str:
    """Return the plan of a call, or a sentence that says why this backend cannot take it."""
    if call.pool > 1:
        return "npu_lightning_indexer selects single keys (pool=1)"
    if not call.use_relu:
        return "npu_lightning_indexer always clamps the products at zero (use_relu=True)"
    if topk > _ANY_TOPK and topk not in TOPK_WIDTHS:
        return (
            f"npu_lightning_indexer takes topk up to {_ANY_TOPK} and multiples of 1024 up to 8192, and fewer "
            "keys than topk leave another width"
        )
    layout = layout_of_ranges(ranges, call.key.shape[1])
    return layout if isinstance(layout, str) else Plan(layout, in_order)


def select(call: IndexerCall, topk: int, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Return indices and scores of the selected keys, ``[batch, query_length, topk]`` each.

    The operator takes the weights in the query's dtype and returns the scores in it.
    """
    layout = call.plan.layout
    packed, values = npu_op("npu_lightning_indexer")(
        layout.pack(call.query),
        layout.pack(call.key[:, :, None]),
        layout.pack(call.weights.to(call.query.dtype)),
        actual_seq_lengths_query=layout.query_lengths,
        actual_seq_lengths_key=layout.key_lengths,
        layout_query=layout.name,
        layout_key=layout.name,
        sparse_count=topk,
        sparse_mode=3,
        return_value=True,
    )
    # [batch, query_length, topk] both, -1 at the tail, otherwise in the operator's unspecified order
    selected = layout.unpack_indices(packed.select(-2, 0))
    scores = layout.unpack(values.select(-2, 0)).float()
    if not call.plan.in_order:
        return selected, scores.masked_fill(selected < 0, -torch.inf)
    ascending, order = _in_order(selected, call.key.shape[1])
    # [batch, query_length, topk] each
    return ascending, scores.gather(-1, order).masked_fill(ascending < 0, -torch.inf)


def _in_order(chosen: Tensor, key_length: int) -> tuple[Tensor, Tensor]:
    """Sort the key positions in ascending order, -1 at the tail; also return the sorting permutation."""
    positions = chosen.float() if key_length < _EXACT_IN_FP32 else chosen
    # key_length stands for "no key" so that these entries sort to the tail.
    ascending, order = positions.masked_fill(chosen < 0, key_length).sort(dim=-1)
    return ascending.masked_fill(ascending == key_length, -1).to(chosen.dtype), order


def score_gradients(
    call: IndexerCall, topk_indices: Tensor, grad_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the scores at ``topk_indices`` with respect to query, key and weights.

    If the fused operator does not support the call (for example GLM's 32 heads), PyTorch computes the
    gradients in chunks, and the reason is logged once. The layout comes from the call's plan, or is derived
    from ``topk_indices`` if :func:`select` did not run.
    """
    reason = _gradient_declines(call, topk_indices.shape[2])
    if reason is None:
        layout = call.plan.layout if call.plan else layout_of_indices(topk_indices, call.key.shape[1])
        if not isinstance(layout, str) and layout.shortest >= _GRAD_TOPK:
            return _fused_gradients(call, topk_indices, grad_scores, layout)
        reason = layout if isinstance(layout, str) else f"it takes sequences of at least {_GRAD_TOPK} keys"
    _log.info(
        "the gradient of lightning_indexer is computed in chunks (not by %s: %s)", _GRAD, reason, once=True
    )
    return chunked.score_gradients(call, topk_indices, grad_scores)


def _gradient_declines(call: IndexerCall, topk: int) -> str | None:
    """Return why the gradient operator does not support a call, or None; does not check the layout."""
    if not product().indexer_gradient:
        return f"it does not run on this device, {product().name}"
    if (call.query.shape[2], topk) != (_GRAD_HEADS, _GRAD_TOPK):
        return f"it takes {_GRAD_HEADS} heads and topk {_GRAD_TOPK} only"
    if not call.use_relu:
        return "it always clamps the products at zero (use_relu=True)"
    if torch.are_deterministic_algorithms_enabled():
        return "it adds to keys in no fixed order"
    return None


def _fused_gradients(
    call: IndexerCall, topk_indices: Tensor, grad_scores: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, weights = call.query, call.key, call.weights
    packed = layout.name == "TND"
    grad_scores = grad_scores.masked_fill(~names_key(topk_indices, key.shape[1]), 0)
    # 16-bit operands: scale the largest gradient to about 1, so that a mean's small gradients do not vanish.
    factor = raising_factor(grad_scores.abs().amax().float(), 0)
    grad_query, grad_key, grad_weights = npu_op(_GRAD)(
        layout.pack(query),
        layout.pack(key[:, :, None]),
        layout.pack((grad_scores * factor).to(query.dtype)),
        layout.pack_indices(topk_indices),
        layout.pack(weights.to(query.dtype)),
        # The gradient operator takes lengths for packed sequences only, unlike the forward operator.
        actual_seq_lengths_query=layout.query_lengths if packed else None,
        actual_seq_lengths_key=layout.key_lengths if packed else None,
        layout=layout.name,
        sparse_mode=3,
    )
    return (
        (layout.unpack(grad_query).float() / factor).to(query.dtype),
        (layout.unpack(grad_key.squeeze(-2)).float() / factor).to(key.dtype),  # [batch, key_length, head_dim]
        (layout.unpack(grad_weights).float() / factor).to(weights.dtype),
    )
