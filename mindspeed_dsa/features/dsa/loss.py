"""Indexer loss on the operator: a context parallel rank's share of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import all_reduce

from mindspeed_dsa.features.dsa.main_attention import attend_sparsely
from mindspeed_dsa.features.dsa.problem import (
    Attended,
    Groups,
    IndexInputs,
    LossOptions,
    Operands,
    Problem,
    Rows,
    Selection,
)
from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss, indexer_kl_loss


def share_of_rank(loss: LossOptions, rows: Rows, groups: Groups) -> tuple[str, float | Tensor]:
    """Return how the operators reduce over this rank's rows, and the factor of the result.

    The product is the sum over this rank's rows divided by the rows of all context parallel ranks that count,
    so that losses, and their gradients, add up over ranks to those of the whole sequence. A collective of the
    context parallel ranks where not every row counts, and how many do is not known.
    """
    if loss.per_token:
        return "sum", loss.coefficient
    if rows.count is not None:
        return "sum", loss.coefficient / max(rows.count, 1)
    if groups.context is None or rows.counted is None:
        # Context parallel ranks hold the same number of rows.
        return "mean", loss.coefficient / groups.context_ranks
    # Padding is not spread evenly over ranks.
    count = rows.counted.sum(dtype=torch.float32)
    all_reduce(count, group=groups.context)
    return "sum", loss.coefficient / count.clamp_min(1)


def sparse_loss(problem: Problem, selection: Selection, attended: Attended | None = None) -> Tensor:
    """Compare both distributions on the selected keys.

    Args:
        problem: the layer's.
        selection: the selected keys.
        attended: has the attention's probabilities; without it they are recomputed.

    Returns:
        This rank's share of the loss, a scalar, coefficient included.
    """
    operands, rows, groups, backend = problem.operands, problem.rows, problem.groups, problem.backend
    query, key = operands.detached()
    attention_sum, lse = (attended.attention_sum, attended.lse) if attended else (None, None)
    if attention_sum is None and not operands.absorbed:
        attention_sum = attention_sum_by_head(operands, selection.topk_indices, backend)
    inputs = selection.inputs
    reduction, factor = share_of_rank(problem.wanted, rows, groups)
    value = indexer_kl_loss(
        inputs.query,
        inputs.key,
        inputs.weights,
        query,
        # With a given sum the key is not read, and heads with separate keys have no single one.
        key if key.dim() == 3 else key[:, :, 0],
        selection.topk_indices,
        operands.softmax_scale,
        lse=lse,
        topk_scores=selection.topk_scores,
        attention_sum=attention_sum,
        row_mask=rows.counted,
        reduction=reduction,
        tp_group=groups.tensor,
        use_relu=inputs.use_relu,
        **{name: None if rope is None else rope.detach() for name, rope in operands.ropes().items()},
        form=selection.form,
        backend=backend,
    )
    return value * factor


def dense_loss(problem: Problem, inputs: IndexInputs) -> Tensor:
    """Compare both distributions on all visible keys; otherwise as :func:`sparse_loss`."""
    operands, rows, groups = problem.operands, problem.rows, problem.groups
    reduction, factor = share_of_rank(problem.wanted, rows, groups)
    value = dense_indexer_kl_loss(
        inputs.query,
        inputs.key,
        inputs.weights,
        *operands.whole().detached(),
        operands.softmax_scale,
        starts=rows.starts,
        ends=rows.ends,
        row_mask=rows.counted,
        reduction=reduction,
        tp_group=groups.tensor,
        use_relu=inputs.use_relu,
        form=rows.form,
        backend=problem.backend,
    )
    return value * factor


def attention_mass(problem: Problem, topk_indices: Tensor) -> Tensor:
    """Return each key's share of its row's attention, a mean over the heads of all tensor parallel ranks.

    Runs the attention once more, without a graph; a collective of the tensor parallel ranks.

    Args:
        problem: the layer's.
        topk_indices: ``[b, s, topk]``; fewer rows where those at the end are padding.

    Returns:
        ``[b, s, topk]`` fp32, which sums to 1 over a row's keys.
    """
    if topk_indices.shape[1] < problem.operands.query.shape[0]:
        problem = problem.first(topk_indices.shape[1])
    summed = attention_sum_by_head(problem.operands, topk_indices, problem.backend).clone()
    heads = problem.operands.query.shape[2]
    if problem.groups.tensor is not None:
        all_reduce(summed, group=problem.groups.tensor)
        heads *= problem.groups.tensor.size()
    return summed / heads


def attention_sum_by_head(operands: Operands, topk_indices: Tensor, backend: str) -> Tensor:
    """Return probabilities summed over this rank's heads: ``[b, s, topk]`` fp32, no gradient."""
    with torch.no_grad():
        summed = attend_sparsely(operands, topk_indices, backend, with_sum=True).attention_sum
    assert summed is not None
    return summed
