"""Permutation of tokens by expert on Ascend NPUs: torch_npu's operators.

They want every token to go to equally many experts. Each token then owns ``topk`` rows, and the operators'
``sorted_indices [tokens * topk]`` is :attr:`RowMap.rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.moe_permute.row_map import Permutation, RowMap, chunk_rows, group_of_rows, unpack
from mindspeed_dsa.ops.npu.device import npu_op, unavailable

KIND: Literal["gradients"] = "gradients"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_EXPERTS_OF_A_TOKEN = 512
# Indices pass through fp32 on the device.
_MOST = 16_777_215
_PERMUTE = "npu_moe_token_permute_with_routing_map"
_PERMUTE_GRAD = "npu_moe_token_permute_with_routing_map_grad"
_FINALIZE = "npu_moe_finalize_routing"


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    if shape.dtype not in _DTYPES:
        return "torch_npu's operators take fp32, bf16 and fp16"
    return unavailable(shape.device, _PERMUTE, _PERMUTE_GRAD, _FINALIZE)


def plan_permute(tokens: Tensor, probs: Tensor | None, topk: int | None) -> Any:
    """Why torch_npu's operators cannot take this call, or None."""
    if topk is None:
        return "its operators need every token to go to equally many experts"
    if not 1 <= topk < _MOST_EXPERTS_OF_A_TOKEN:
        return f"{_PERMUTE} takes 1 to {_MOST_EXPERTS_OF_A_TOKEN - 1} experts for a token"
    if len(tokens) * topk >= _MOST:
        return f"{_PERMUTE} takes fewer than {_MOST} rows"
    return None


def plan_unpermute(row_map: Tensor, rows: int, probs: Tensor | None) -> Any:
    """Why torch_npu's operators cannot take this call, or None."""
    if len(row_map) != 3 * rows:
        return "its operators need every token to have equally many rows"
    if probs is not None:
        return f"{_FINALIZE} has no gradient of its weights"
    return None


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, rows: int | None, topk: int | None
) -> Permutation:
    """Rows expert by expert."""
    assert topk is not None
    # The operator wants probabilities in the dtype of the tokens, which rounds those of a router in fp32.
    alike = probs is not None and probs.dtype == tokens.dtype
    permuted, permuted_probs, listed = npu_op(_PERMUTE)(
        tokens,
        routing_map,
        probs=probs if alike else None,
        num_out_tokens=len(tokens) * topk,
        drop_and_pad=False,
    )
    found = _row_map(listed, routing_map, topk)
    if probs is not None and not alike:
        permuted_probs = probs.reshape(-1).index_select(0, found.slots(probs.shape[1]))
    return permuted, permuted_probs if probs is not None else None, found.pack()


def permute_gradients(
    grad_permuted: Tensor | None, grad_probs: Tensor | None, row_map: Tensor, routing_map: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``[tokens, hidden]`` and of the probabilities ``[tokens, experts]``."""
    tokens, experts = routing_map.shape
    either = grad_permuted if grad_permuted is not None else grad_probs
    assert either is not None
    found = unpack(row_map, tokens, len(either))
    alike = grad_permuted is not None and grad_probs is not None and grad_probs.dtype == grad_permuted.dtype
    grad_tokens = dense = None
    if grad_permuted is not None:
        grad_tokens, dense = npu_op(_PERMUTE_GRAD)(
            grad_permuted, grad_probs if alike else None, found.rows, routing_map, experts, tokens, False
        )
    if grad_probs is None:
        return grad_tokens, None
    if not alike:
        dense = grad_probs.new_zeros(tokens * experts)
        dense = dense.index_copy_(0, found.slots(experts).long(), grad_probs).view(tokens, experts)
    return grad_tokens, dense


def unpermute(
    permuted: Tensor, row_map: Tensor, tokens: int, probs: Tensor | None, addend: Tensor | None
) -> Tensor:
    """Each token's rows, added up: ``[tokens, hidden]``."""
    topk = len(permuted) // tokens
    # The operator wants the first row of every token, then the second of every token, and so on.
    by_choice = unpack(row_map, tokens, len(permuted)).rows.view(tokens, topk).t().reshape(-1)
    # How many rows a token has it takes from the scales. A parameter for this is in some releases only, and
    # wants a CANN newer than most that they run with.
    scales = permuted.new_ones(tokens, topk)
    total: Tensor = npu_op(_FINALIZE)(permuted, addend, None, None, scales, by_choice, None)
    return total


def unpermute_gradients(
    grad: Tensor, row_map: Tensor, rows: int, permuted: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the permuted rows."""
    return grad.index_select(0, unpack(row_map, len(grad), rows).tokens), None


def sort_chunks(tensors: Sequence[Tensor], split_sizes: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """Chunks of rows in another order, the same for each tensor."""
    device = tensors[0].device
    before = chunk_rows(split_sizes.to(device), order.to(device), len(tensors[0]))
    return tuple(tensor.index_select(0, before) for tensor in tensors)


def _row_map(listed: Tensor, routing_map: Tensor, topk: int) -> RowMap:
    """The map of the operator's ``sorted_indices``; waits for nothing."""
    rows = len(listed)
    token = torch.arange(rows // topk, dtype=torch.int32, device=listed.device)
    by_place = token[:, None].expand(-1, topk).reshape(-1)
    tokens = torch.empty_like(listed).index_copy_(0, listed.long(), by_place)
    counts = routing_map.sum(0, dtype=torch.int32)
    return RowMap(None, listed, tokens, group_of_rows(counts, rows))
