"""Indexer loss computed with our operators, as this context parallel rank's share of the total."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import all_reduce

from mindspeed_dsa.features.dsa.main_attention import attend_sparsely
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import (
    Attended,
    Groups,
    IndexInputs,
    LossOptions,
    Problem,
    Rows,
    Selection,
)
from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss, indexer_kl_loss


def share_of_rank(loss: LossOptions, rows: Rows, groups: Groups) -> tuple[str, float | Tensor]:
    """Return the loss operators' ``reduction`` argument, and a factor for their result.

    The result times the factor is this rank's share of the loss, times the coefficient. The shares of all
    context parallel ranks add up to the loss: a sum over tokens if ``loss.per_token``, otherwise a mean over
    all counted tokens. If the number of counted tokens is unknown because of padding, an all-reduce over the
    context parallel ranks computes it.
    """
    if loss.per_token:
        return "sum", loss.coefficient
    if rows.count is not None:
        return "sum", loss.coefficient / max(rows.count, 1)
    if groups.context is None or rows.counted is None:
        # All context parallel ranks have the same number of rows: sum of (mean / ranks) = mean of all.
        return "mean", loss.coefficient / groups.context_ranks
    # Ranks have different numbers of padding rows: exchange the counts.
    count = rows.counted.sum(dtype=torch.float32)
    all_reduce(count, group=groups.context)
    # At least 1: a microbatch of padding only has a loss of 0, not NaN.
    return "sum", loss.coefficient / count.clamp_min(1)


def sparse_loss(problem: Problem, selection: Selection, attended: Attended | None = None) -> Tensor:
    """Compute the KL divergence between attention and indexer on the selected keys.

    Args:
        problem: sparse attention of the layer.
        selection: selected keys.
        attended: attention output with its probabilities; None: probabilities are recomputed.

    Returns:
        This rank's share of the loss, a scalar, multiplied by the coefficient.
    """
    operands, rows, groups, backend = problem.operands, problem.rows, problem.groups, problem.backend
    query, key = operands.detached()  # [b, s, heads, dim], [b, keys, dim] or per head
    attention_sum, lse = (attended.attention_sum, attended.lse) if attended else (None, None)
    if attention_sum is None and not operands.absorbed:
        attention_sum = attention_sum_by_head(operands, selection.topk_indices, backend)
    inputs = selection.inputs
    # The gradient has to flow through the scores, where gradients of other layers are added.
    index_query = inputs.query if problem.serving is None else inputs.query.detach()
    reduction, factor = share_of_rank(problem.wanted, rows, groups)
    value = indexer_kl_loss(
        index_query,
        inputs.key,
        inputs.weights,
        query,
        # With attention_sum the operator does not read the key. Per-head keys have no common one: pass the
        # first head's, which has the expected shape.
        key if key.dim() == 3 else key[:, :, 0],  # [b, keys, dim]
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
    """Compute the KL divergence on all visible keys; otherwise like :func:`sparse_loss`."""
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
    """Return each selected key's attention probability, averaged over the heads of all ranks.

    Runs the attention again without gradients, and an all-reduce over the tensor parallel ranks.

    Args:
        problem: sparse attention of the layer.
        topk_indices: selected keys ``[b, s, topk]``. Padding tokens at the end can be omitted.

    Returns:
        Probabilities ``[b, s, topk]`` fp32, which sum to 1 for each query token.
    """
    if topk_indices.shape[1] < problem.operands.query.shape[0]:
        problem = problem.first(topk_indices.shape[1])
    # clone, because all_reduce below writes in place
    summed = attention_sum_by_head(problem.operands, topk_indices, problem.backend).clone()
    heads = problem.operands.query.shape[2]
    if problem.groups.tensor is not None:
        all_reduce(summed, group=problem.groups.tensor)
        heads *= problem.groups.tensor.size()
    return summed / heads


def attention_sum_by_head(operands: Operands, topk_indices: Tensor, backend: str) -> Tensor:
    """Return attention probabilities summed over this rank's heads, ``[b, s, topk]`` fp32, detached."""
    with torch.no_grad():
        summed = attend_sparsely(operands, topk_indices, backend, with_sum=True).attention_sum
    assert summed is not None
    return summed
