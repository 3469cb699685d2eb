"""Norms and experts on the operators: what every release of TorchTitan shares; tensors in, tensors out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from mindspeed_dsa.ops.grouped_matmul import grouped_matmul
from mindspeed_dsa.ops.moe_permute import permute, unpermute
from mindspeed_dsa.ops.rms_norm import rms_norm


def normalise(hidden: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """Return :func:`mindspeed_dsa.ops.rms_norm.rms_norm` of a tensor, or of the local parts of DTensors.

    Args:
        hidden: ``[..., n]``; a DTensor may be sharded along any axis but the last.
        weight: ``[n]``, whole on every rank.
        eps: None is the smallest step of the dtype, as for ``nn.RMSNorm``.
    """
    if eps is None:
        eps = torch.finfo(hidden.dtype).eps
    if not isinstance(hidden, DTensor):
        return rms_norm(hidden, weight.to_local() if isinstance(weight, DTensor) else weight, eps)
    mesh, placements = hidden.device_mesh, hidden.placements
    if isinstance(weight, DTensor):
        # Ranks with rows of their own find a part of the weight's gradient each, the others all of it.
        of_gradient = [Replicate() if p.is_replicate() else Partial() for p in placements]
        weight = weight.to_local(grad_placements=of_gradient)
    return DTensor.from_local(rms_norm(hidden.to_local(), weight, eps), mesh, placements, run_check=False)


def multiply_up_to(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group's rows with its matrix, as ``torch._grouped_mm``.

    Args:
        rows: ``[rows, in]``.
        weight: ``[groups, in, out]``, of any strides.
        ends: ``[groups]`` int, one past each group's last row, ascending; rows beyond the last of them are
            multiplied with the last matrix.
    """
    ends = torch.cat([ends[:-1], ends.new_full((1,), len(rows))])
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    if weight.stride(1) < weight.stride(2):  # a linear layer's weight, turned
        return grouped_matmul(rows, weight.transpose(1, 2), counts, layout="nk")
    return grouped_matmul(rows, weight, counts)


class Routed(NamedTuple):
    """Rows of the experts and the way back."""

    rows: Tensor
    """``[tokens * topk, dim]``: expert by expert, in the order of the tokens within each."""
    row_map: Tensor
    """The map that :func:`mindspeed_dsa.ops.moe_permute.permute` returns."""
    scores: Tensor
    """``[tokens, experts]``: the router's where a token goes, zero elsewhere."""
    row_scores: Tensor
    """``[tokens * topk]``: the scores of the rows."""


def route(tokens: Tensor, expert_ids: Tensor, scores: Tensor, experts: int) -> Routed:
    """Copy every token once for each of its experts.

    Args:
        tokens: ``[tokens, dim]``.
        expert_ids: ``[tokens, topk]`` int64, different ones for each token.
        scores: ``[tokens, topk]``.
        experts: how many there are.
    """
    count, topk = expert_ids.shape
    chosen = torch.zeros(count, experts, dtype=torch.bool, device=tokens.device).scatter(1, expert_ids, True)
    spread = scores.new_zeros(count, experts).scatter(1, expert_ids, scores)
    permuted = permute(tokens, chosen, spread, rows=count * topk, topk=topk)
    assert permuted.probs is not None
    return Routed(permuted.tokens, permuted.row_map, spread, permuted.probs)


def gather_back(rows: Tensor, routed: Routed, addend: Tensor | None = None, weighted: bool = True) -> Tensor:
    """Add up every token's rows, weighted by its scores, in ascending order of experts.

    Args:
        rows: ``[tokens * topk, dim]``, what the experts made of :attr:`Routed.rows`.
        routed: of the tokens.
        addend: ``[tokens, dim]`` in the rows' dtype: what a shared expert made of them.
        weighted: whether rows still have to be multiplied by their scores.

    Returns:
        ``[tokens, dim]`` in the rows' dtype.
    """
    scores = routed.scores if weighted else None
    return unpermute(rows, routed.row_map, len(routed.scores), scores, addend=addend)
