"""Norm, grouped matmul and permutation functions on our operators, shared by all TorchTitan releases."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from mindspeed_dsa.ops.grouped_matmul import grouped_matmul
from mindspeed_dsa.ops.moe_permute import permute, unpermute
from mindspeed_dsa.ops.rms_norm import rms_norm


def normalise(hidden: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """Apply :func:`mindspeed_dsa.ops.rms_norm.rms_norm` to a tensor, or to the local parts of DTensors.

    Args:
        hidden: ``[..., n]``; a DTensor may be sharded along any dimension but the last.
        weight: ``[n]``, replicated on every rank.
        eps: epsilon; ``None`` means the dtype's machine epsilon, as for ``nn.RMSNorm``.
    """
    if eps is None:
        eps = torch.finfo(hidden.dtype).eps
    if not isinstance(hidden, DTensor):
        return rms_norm(hidden, weight.to_local() if isinstance(weight, DTensor) else weight, eps)
    mesh, placements = hidden.device_mesh, hidden.placements
    if isinstance(weight, DTensor):
        # A rank with its own tokens computes a part of the weight gradient; ranks with the same tokens all of
        # it.
        of_gradient = [Replicate() if p.is_replicate() else Partial() for p in placements]
        weight = weight.to_local(grad_placements=of_gradient)
    return DTensor.from_local(rms_norm(hidden.to_local(), weight, eps), mesh, placements, run_check=False)


def multiply_up_to(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Grouped matmul like ``torch._grouped_mm``: multiply each group's rows by the group's matrix.

    Args:
        rows: ``[rows, in]``.
        weight: ``[groups, in, out]``, with any strides.
        ends: ``[groups]`` int, ascending, one past each group's last row. Rows after the last end belong to
            the last group.
    """
    # Extend the last group to the end, so that counts add up to len(rows).
    ends = torch.cat([ends[:-1], ends.new_full((1,), len(rows))])
    # Ends [3, 3, 5] are counts [3, 0, 2].
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    if weight.stride(1) < weight.stride(2):  # transposed view of a linear layer's weight
        return grouped_matmul(rows, weight.transpose(1, 2), counts, layout="nk")
    return grouped_matmul(rows, weight, counts)


class Routed(NamedTuple):
    """Tokens sorted by expert, with the data for the reverse permutation."""

    rows: Tensor
    """``[tokens * topk, dim]``: sorted by expert, and by token within each expert."""
    row_map: Tensor
    """Row map that :func:`mindspeed_dsa.ops.moe_permute.permute` returns."""
    scores: Tensor
    """``[tokens, experts]``: router's scores of the selected experts, zero elsewhere."""
    row_scores: Tensor
    """``[tokens * topk]``: scores in the order of ``rows``."""


def route(tokens: Tensor, expert_ids: Tensor, scores: Tensor, experts: int) -> Routed:
    """Copy every token once per selected expert, sorted by expert.

    Args:
        tokens: ``[tokens, dim]``.
        expert_ids: ``[tokens, topk]`` int64, without duplicates within a token.
        scores: ``[tokens, topk]``.
        experts: number of experts.
    """
    count, topk = expert_ids.shape
    routing = torch.zeros(count, experts, dtype=torch.bool, device=tokens.device).scatter(1, expert_ids, True)
    # topk scores per token as a sparse [tokens, experts] matrix.
    spread = scores.new_zeros(count, experts).scatter(1, expert_ids, scores)
    permuted = permute(tokens, routing, spread, rows=count * topk, topk=topk)
    assert permuted.probs is not None
    return Routed(permuted.tokens, permuted.row_map, spread, permuted.probs)


def gather_back(rows: Tensor, routed: Routed, addend: Tensor | None = None, weighted: bool = True) -> Tensor:
    """Sum the expert outputs of each token, weighted by its scores, in ascending order of experts.

    Args:
        rows: ``[tokens * topk, dim]``, outputs of the experts for :attr:`Routed.rows`.
        routed: result of :func:`route`.
        addend: ``[tokens, dim]`` in the dtype of ``rows``, output of a shared expert.
        weighted: whether to multiply rows by their scores here.

    Returns:
        ``[tokens, dim]`` in the dtype of ``rows``.
    """
    scores = routed.scores if weighted else None
    return unpermute(rows, routed.row_map, len(routed.scores), scores, addend=addend)
