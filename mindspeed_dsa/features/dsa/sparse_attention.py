"""DeepSeek Sparse Attention of one layer: from operands to attention output and indexer loss.

It is called by adapters for Megatron's releases: :mod:`.core_attention` (0.16 to 0.18, and the backport to
older releases) and :mod:`.kernel_hooks.hooks` (0.19).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.features.dsa.loss import dense_loss, share_of_rank, sparse_loss
from mindspeed_dsa.features.dsa.main_attention import attend_densely, attend_sparsely
from mindspeed_dsa.features.dsa.operands import Operands, Run
from mindspeed_dsa.features.dsa.problem import Attended, IndexInputs, Problem, Rows, Selection
from mindspeed_dsa.features.dsa.served import hand_on_inputs, served_dense_loss, served_sparse_loss
from mindspeed_dsa.megatron.selection_source import Chosen, RowRun
from mindspeed_dsa.megatron.served_index import Delivery, ServedIndex
from mindspeed_dsa.ops.indexer_kl_loss import divergence_and_score_gradient, takes_lse
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.quantised_indexer import quantised_indexer


class Result(NamedTuple):
    """Result of a layer's sparse attention."""

    out: Tensor
    """``[s, b, heads * value_dim]``."""
    loss: Tensor | None
    """Scalar with coefficient; see :class:`LossOptions`. None without a loss, or if the attention's backward
    computes it."""
    topk_indices: tuple[Tensor | None, ...] = (None,)
    """``[b, s, topk]`` int32 for each run of tokens; None where tokens attend to all visible keys."""
    served: tuple[ServedIndex | None, ...] = ()
    """Outputs of the indexer for losses of other layers, for each run of tokens."""
    deliveries: tuple[Delivery, ...] = ()
    """Gradients of ``loss`` for another layer's indexer; ``loss`` has no graph then."""


def sparse_attention(problem: Problem, index: IndexInputs | None) -> Result:
    """Select keys for every query token, attend to them, and compute the indexer loss.

    Args:
        problem: inputs of the layer's sparse attention.
        index: query, key and weights of the indexer; None is allowed if ``problem.needs_index`` is false.
    """
    rows, loss, parts, serving = problem.rows, problem.loss, problem.parts, problem.serving
    if rows.end is not None:
        # Drop the padding, so that operators that take only consecutive documents can run as well.
        padding = problem.operands.query.shape[0] - rows.end
        index = None if index is None else index.first(rows.end)
        result = sparse_attention(problem.first(rows.end), index)
        return result._replace(out=F.pad(result.out, (0, 0, 0, 0, 0, padding)))  # [s, b, heads * value_dim]

    if problem.given is not None and problem.given.is_shared:
        return _attend_to_shared(problem, problem.given)

    def choose() -> Selection:
        if parts.choose is not None:
            return parts.choose()
        if problem.given is not None:
            return _scored(problem, problem.given, _present(index))
        return select_keys(
            _present(index),
            problem.topk,
            rows,
            problem.backend,
            precision=problem.precision,
            with_scores=problem.reads_scores,
        )

    served: tuple[ServedIndex, ...] = ()
    inputs_of_loss = index
    if serving is not None and not serving.scores:
        one, inputs_of_loss = hand_on_inputs(serving, _present(index))
        served = (one,)

    if problem.is_dense:
        out = attend_densely(problem.operands, rows, problem.backend).out
        if loss is None:
            return Result(out, None, served=served)
        if parts.loss is not None:
            return Result(out, parts.loss(problem.operands, choose()))
        # With every visible key selected, the sparse and the dense loss are equal.
        return Result(out, dense_loss(problem, _present(inputs_of_loss)), served=served)
    if problem.given is not None and not problem.needs_index:
        # A recorded selection, without a loss.
        topk_indices = problem.given.of_all_rows
        return Result(_attend_to(problem, topk_indices).out, None, (topk_indices,))

    with torch.set_grad_enabled(loss is not None):
        selection = choose()
        if serving is not None and serving.scores and selection.topk_scores is not None:
            use_relu = selection.inputs.use_relu
            one, (linked,) = serving.hand_on(selection.topk_scores, use_relu=use_relu)
            served, selection = (one,), replace(selection, topk_scores=linked)
    # Scores without a gradient have no backward pass to compute the loss in.
    scores = selection.topk_scores
    if (
        loss is not None
        and loss.in_backward is not None
        and loss.on_chosen_keys
        and problem.operands.absorbed
        and scores is not None
        and scores.requires_grad
    ):
        attended = attend_sparsely(
            problem.operands,
            selection.topk_indices,
            problem.backend,
            False,
            scores,
            _loss_in_backward(problem, scores, selection.topk_indices, loss.in_backward),
            form=selection.form,
        )
        return Result(attended.out, None, (selection.topk_indices,), served)

    if parts.attend is not None:
        attended = parts.attend(problem.operands, selection.topk_indices)
    else:
        with_target = loss is not None and parts.loss is None and loss.on_chosen_keys
        attended = attend_to_chosen(problem, selection, with_target)
    if loss is None:
        value = None
    elif parts.loss is not None:
        value = parts.loss(problem.operands, selection)
    elif loss.on_chosen_keys:
        value = sparse_loss(problem, selection, attended)
    else:
        value = dense_loss(problem, _present(inputs_of_loss))
    return Result(attended.out, value, (selection.topk_indices,), served)


def _attend_to_shared(problem: Problem, given: Chosen) -> Result:
    """Attend to the selection of a layer below. A loss belongs to the indexer of the layer below."""
    (topk_indices,), loss, operands = given.topk_indices, problem.loss, problem.operands
    if topk_indices is None:
        out = attend_densely(operands, problem.rows, problem.backend).out
    elif loss is None or not loss.on_chosen_keys:
        out = _attend_to(problem, topk_indices).out
    if loss is None:
        return Result(out, None, (topk_indices,))
    (served,) = given.index
    assert served is not None, "the layer that selects hands it on with the keys"
    if topk_indices is None or not loss.on_chosen_keys:
        value, gradients = served_dense_loss(problem, served)
    elif loss.in_backward is not None and operands.absorbed:
        query, scores = served.scores_behind(operands.query)
        attended = attend_sparsely(
            replace(operands, query=query),
            topk_indices,
            problem.backend,
            False,
            scores,
            _loss_in_backward(problem, scores, topk_indices, loss.in_backward),
            form=problem.rows.form,
        )
        return Result(attended.out, None, (topk_indices,))
    else:
        (scores,) = served.outputs
        attended = attend_sparsely(operands, topk_indices, problem.backend, True, form=problem.rows.form)
        out, attention_sum = attended.out, attended.attention_sum
        assert attention_sum is not None
        value, gradients = served_sparse_loss(problem, scores, attention_sum, topk_indices)
    return Result(out, value, (topk_indices,), deliveries=(served.delivery(gradients),))


def _attend_to(problem: Problem, topk_indices: Tensor) -> Attended:
    """Compute attention to given keys, with Megatron's code or our operator."""
    if problem.parts.attend is not None:
        return problem.parts.attend(problem.operands, topk_indices)
    form = problem.rows.form
    return attend_sparsely(problem.operands, topk_indices, problem.backend, with_sum=False, form=form)


def _scored(problem: Problem, given: Chosen, index: IndexInputs) -> Selection:
    """Return the given keys with the indexer's scores. Tokens without given keys get the indexer's keys."""
    rows = problem.rows
    indexer_selection = select_keys(
        index, problem.topk, rows, problem.backend, True, problem.precision, problem.reads_scores
    )
    topk_indices = given.of_all_rows
    if given.missing is not None:
        # missing [b, s] -> [b, s, 1]
        topk_indices = torch.where(given.missing[..., None], indexer_selection.topk_indices, topk_indices)
    # Scores at given indices are summed in another order than scores of a selection. If both have the same
    # keys, return the selection's scores, so that a replayed run repeats its losses bit for bit.
    if torch.equal(topk_indices, indexer_selection.topk_indices):
        return indexer_selection
    scores = _scores_at(index, topk_indices, problem.backend) if problem.reads_scores else None
    return Selection(topk_indices, scores, index, form=rows.form)


def _scores_at(index: IndexInputs, topk_indices: Tensor, backend: str) -> Tensor:
    return selected_scores(
        index.query,
        index.key,
        index.weights,
        topk_indices,
        use_relu=index.use_relu,
        key_receiver=index.key_receiver,
        backend=backend,
    )


def select_keys(
    index: IndexInputs,
    topk: int,
    rows: Rows,
    backend: str,
    in_order: bool = False,
    precision: str = "full",
    with_scores: bool = True,
) -> Selection:
    """Select the keys of every query token with the Lightning Indexer operator.

    The returned scores are always in full precision, so the loss on them does not depend on ``precision``.

    Args:
        index: query, key and weights of the indexer.
        topk: number of keys per query token.
        rows: range of keys that each query token sees.
        backend: backend of the operator.
        in_order: whether to return the keys of each token in ascending order.
        precision: precision in which keys are selected, one of :data:`mindspeed_dsa.megatron.dsa.PRECISIONS`.
        with_scores: whether the scores are needed. Selection in full precision always returns them.
    """
    if precision != "full":
        topk_indices = quantised_indexer(
            index.query,
            index.key,
            index.weights,
            topk,
            powers_of_two=precision == "fp8",
            starts=rows.starts,
            ends=rows.ends,
            use_relu=index.use_relu,
            form=rows.form,
            backend=backend,
        )
        scores = _scores_at(index, topk_indices, backend) if with_scores else None
        return Selection(topk_indices, scores, index, form=rows.form)
    topk_indices, topk_scores = lightning_indexer(
        index.query,
        index.key,
        index.weights,
        topk,
        starts=rows.starts,
        ends=rows.ends,
        use_relu=index.use_relu,
        key_receiver=index.key_receiver,
        form=rows.form,
        in_order=in_order,
        backend=backend,
    )
    return Selection(topk_indices, topk_scores, index, form=rows.form)


def attend_to_chosen(problem: Problem, selection: Selection, with_target: bool) -> Attended:
    """Compute attention to the selected keys with our operator.

    Args:
        problem: inputs of the layer's sparse attention.
        selection: selected keys.
        with_target: whether to return the tensor that the sparse loss needs: probabilities summed over heads,
            or only ``lse`` if the loss operator recomputes the probabilities.
    """
    operands, inputs = problem.operands, selection.inputs
    if with_target and operands.absorbed and problem.rows.counted is None and inputs.use_relu:
        # [s, b, heads, dim] -> [b, s, heads, dim]
        query, topk = operands.query.transpose(0, 1), selection.topk_indices.shape[-1]
        with_target = not takes_lse(inputs.query, query, topk, backend=problem.backend)
    return attend_sparsely(
        operands, selection.topk_indices, problem.backend, with_sum=with_target, form=selection.form
    )


def _loss_in_backward(
    problem: Problem, topk_scores: Tensor, indices: Tensor, report: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return the ``score_gradient`` callback, which computes the loss in the attention's backward."""
    scores = topk_scores.detach()
    # The callback lives until backward. It must not hold the operands.
    rows, groups, loss, backend = problem.rows, problem.groups, problem.wanted, problem.backend

    def score_gradient(attention_sum: Tensor) -> Tensor:
        # attention_sum [b, s, topk] fp32 -> gradient of the scores, [b, s, topk]
        reduction, factor = share_of_rank(loss, rows, groups)
        value, gradient = divergence_and_score_gradient(
            scores,
            attention_sum,
            indices,
            row_mask=rows.counted,
            reduction=reduction,
            tp_group=groups.tensor,
            backend=backend,
        )
        # report logs the loss and returns the gradient that the loss starts with.
        return gradient * (report(value * factor) * factor)

    return score_gradient


def _present(index: IndexInputs | None) -> IndexInputs:
    assert index is not None, "the caller goes by needs_index"
    return index


# -- runs of contiguous tokens -------------------------------------------------------------------
#
# Ascend's operators take causal rows that end at the last key. A context parallel rank calls them once per
# run of contiguous tokens, with the keys up to the run's end. For packed documents the keys start with the
# document.


def in_runs(device: torch.device) -> bool:
    """Return whether this device's operators accept only one run of contiguous tokens per call."""
    return device.type == "npu"


def attend_by_runs(
    problem: Problem,
    index: IndexInputs | None,
    runs: Sequence[Run],
    all_rows: int,
) -> Result:
    """Call :func:`sparse_attention` separately for each run of contiguous tokens. Absorbed form only.

    Args:
        problem: inputs of the sparse attention of all tokens, with the keys of the whole sequence.
        index: inputs of the indexer for all tokens and keys; None if not needed.
        runs: runs of contiguous tokens that cover all query tokens, in order.
        all_rows: divisor of the mean loss: number of counted tokens on all context parallel ranks.
    """
    loss, results = problem.loss, []
    inputs_of_runs = [None] * len(runs) if index is None else index.by_runs(runs)
    inputs_by_run = zip(problem.operands.by_runs(runs), inputs_of_runs, strict=True)
    for number, ((first, end, low, high), (operands, inputs)) in enumerate(
        zip(runs, inputs_by_run, strict=True)
    ):
        keys = high - low
        if keys == 0:
            results.append(_nothing(operands, inputs if loss is not None else None))
            continue
        share = loss
        if loss is not None and not loss.per_token:
            # Weight of the run's mean in the mean over all rows. Sums need no weight. With 2 ranks, one
            # sequence of 4096 tokens and a run of 1024: 1024 * 1 * 2 / 4096 = 0.5 of this rank's share.
            batch, ranks = problem.operands.query.shape[1], problem.groups.context_ranks
            weight = (end - first) * batch * ranks / all_rows
            share = replace(loss, coefficient=loss.coefficient * weight)
        rows = Rows.to_last_key(end - first, keys, operands.query.device)
        given_keys = problem.given
        if given_keys is not None:
            given_keys = given_keys.of_run(number, RowRun(first, end, low, high))
        serving = None if problem.serving is None else replace(problem.serving, run=number)
        part = replace(problem, operands=operands, rows=rows, loss=share, given=given_keys, serving=serving)
        results.append(sparse_attention(part, inputs))
    losses = [result.loss for result in results if result.loss is not None]
    out = torch.cat([result.out for result in results])  # [s, b, heads * value_dim]
    topk_indices = tuple(indices for result in results for indices in result.topk_indices)
    # One entry per run, None for runs without keys. Empty without losses of other layers, which tells these
    # layers that they have no loss.
    served: tuple[ServedIndex | None, ...] = ()
    if problem.serving is not None:
        served = tuple(one for result in results for one in result.served or (None,))
    deliveries = tuple(one for result in results for one in result.deliveries)
    return Result(out, torch.stack(losses).sum() if losses else None, topk_indices, served, deliveries)


def _nothing(operands: Operands, index: IndexInputs | None) -> Result:
    """Return zeros for tokens without visible keys, connected to the autograd graph."""
    # Other ranks wait in backward for the gradient of their keys, so this rank's backward must run as well.
    query, key, value = operands.query, operands.key, operands.value
    # Sums of empty slices: exact zeros that depend on every input.
    zero = query[:0].sum() + key[:0].sum() + value[:0].sum()
    if operands.key_rope is not None:
        zero = zero + operands.key_rope[:0].sum()
    # [s, b, heads * value_dim]
    out = query.new_zeros(*query.shape[:2], query.shape[2] * value.shape[1]) + zero
    if index is None:
        return Result(out, None)
    return Result(out, index.query[:0].sum() + index.key[:0].sum() + index.weights[:0].sum())
