"""Norms, rotations, grouped matmuls and permutations on our operators, shared by all TorchTitan releases."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from mindspeed_dsa.integrations.torchtitan.in_graphs import call_in_graph, node
from mindspeed_dsa.ops.grouped_matmul import grouped_matmul
from mindspeed_dsa.ops.moe_permute import permute, unpermute
from mindspeed_dsa.ops.rms_norm import rms_norm
from mindspeed_dsa.ops.rotary import Layout, rotate, rotation_by
from mindspeed_dsa.ops.rotary.backends import Reference

_REFERENCE = Reference()  # made here: a graph cannot make an object of an abstract class


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


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate all dimensions of heads in fp32, as TorchTitan does.

    Args:
        heads: ``[..., heads, dim]``; a DTensor may be sharded along any dimension but the last.
        cos: fp32 cosines, ``dim`` last, broadcast against ``heads``. Each value occurs twice, once for each
            dimension of its pair.
        sin: sines, in the same way.
        layout: positions of the two dimensions of a pair.

    Returns:
        Rotated heads, in the shape and dtype of ``heads``.
    """
    if isinstance(heads, DTensor):
        rotated = rotate_heads(heads.to_local(), cos, sin, layout)
        return DTensor.from_local(rotated, heads.device_mesh, heads.placements, run_check=False)
    if torch.compiler.is_compiling():  # the compiler fuses the reference's operations
        return _REFERENCE.forward(heads.float(), cos, sin, layout).type_as(heads)
    # Every token is a row of a batch of one: npu_rotary_mul takes one rotation per row.
    cos, sin = (table.expand(*heads.shape[:-2], 1, -1).flatten(0, -3)[:, None] for table in (cos, sin))
    rows = heads.float().flatten(0, -3)[:, None]  # [tokens, 1, heads, dim]
    rotated = rotate(rows, rotation_by(cos, sin, 1.0, layout, rows))
    return rotated.reshape(heads.shape).type_as(heads)


def multiply_up_to(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Grouped matmul like ``torch._grouped_mm``: multiply each group's rows by the group's matrix.

    Args:
        rows: ``[rows, in]``.
        weight: ``[groups, in, out]``, with any strides.
        ends: ``[groups]`` int, ascending, one past each group's last row. Rows after the last end belong to
            the last group.
    """
    if torch.compiler.is_compiling():
        return call_in_graph("multiply", "", rows, weight, ends)[0]
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
    map_size: Tensor | None = None
    """``[1]`` int64 on the host: entries of ``row_map``; the others are padding. ``None``: all of them."""


def route(tokens: Tensor, expert_ids: Tensor, scores: Tensor, experts: int) -> Routed:
    """Copy every token once per selected expert, sorted by expert.

    Args:
        tokens: ``[tokens, dim]``.
        expert_ids: ``[tokens, topk]`` int64, without duplicates within a token.
        scores: ``[tokens, topk]``.
        experts: number of experts.
    """
    if torch.compiler.is_compiling():
        return Routed(*call_in_graph("route", str(experts), tokens, expert_ids, scores))
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
    if torch.compiler.is_compiling():
        operands = (rows, routed.row_map, routed.map_size, routed.scores, addend)
        return call_in_graph("gather back", str(weighted), *operands)[0]
    scores = routed.scores if weighted else None
    return unpermute(rows, routed.row_map, len(routed.scores), scores, addend=addend)


# -- nodes of compiled graphs ------------------------------------------------------------------


def _multiply(static: str, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor]:
    return (multiply_up_to(rows, weight, ends),)


def _product(static: str, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor]:
    return (rows.new_empty(rows.shape[0], weight.shape[2]),)


def _route(experts: str, tokens: Tensor, expert_ids: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    routed = route(tokens, expert_ids, scores, int(experts))
    # How many entries a map has depends on the backend, and a graph knows only the most.
    size = len(routed.row_map)
    padded = torch.nn.functional.pad(routed.row_map, (0, _map_entries(expert_ids) - size))
    map_size = torch.tensor([size], device="cpu")
    return routed.rows, padded, routed.scores, routed.row_scores, map_size


def _routed(experts: str, tokens: Tensor, expert_ids: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    count, rows = len(tokens), expert_ids.numel()
    return (
        tokens.new_empty(rows, tokens.shape[1]),
        tokens.new_empty(_map_entries(expert_ids), dtype=torch.int32),
        scores.new_empty(count, int(experts)),
        scores.new_empty(rows),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


def _map_entries(expert_ids: Tensor) -> int:
    """Return the most entries of a row map, see :class:`mindspeed_dsa.ops.moe_permute.row_map.RowMap`."""
    return len(expert_ids) + 1 + 3 * expert_ids.numel()


def _gather_back(
    weighted: str, rows: Tensor, row_map: Tensor, map_size: Tensor, scores: Tensor, addend: Tensor | None
) -> tuple[Tensor]:
    routed = Routed(rows, row_map[: int(map_size)], scores, scores)
    return (gather_back(rows, routed, addend, weighted == "True"),)


def _gathered(
    weighted: str, rows: Tensor, row_map: Tensor, map_size: Tensor, scores: Tensor, addend: Tensor | None
) -> tuple[Tensor]:
    return (rows.new_empty(len(scores), rows.shape[1]),)


node("multiply", _multiply, _product)
node("route", _route, _routed)
node("gather back", _gather_back, _gathered)
