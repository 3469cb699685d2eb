"""DeepSeek Sparse Attention of one layer: tensors in, output and indexer loss out.

Every Megatron release calls it through an adapter: patched core attentions (:mod:`.core_attention`, 0.16 to
0.18, and the backport to older releases) and kernel hooks (``adapters.kernel_hooks``, 0.19).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.features.dsa.loss import dense_loss, share_of_rank, sparse_loss
from mindspeed_dsa.features.dsa.main_attention import attend_densely, attend_sparsely
from mindspeed_dsa.features.dsa.problem import (
    Attended,
    Groups,
    IndexInputs,
    LossOptions,
    Operands,
    Parts,
    Rows,
    Selection,
)
from mindspeed_dsa.ops.indexer_kl_loss import divergence_and_score_gradient, takes_lse
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer

OURS = Parts()
"""Every part runs on our operators."""


class Result(NamedTuple):
    """Result of a layer's sparse attention."""

    out: Tensor
    """``[s, b, heads * value_dim]``."""
    loss: Tensor | None
    """Scalar as :class:`LossOptions` says, coefficient included; None if there is no loss, or if it is
    computed in the backward pass."""


def needs_index(keys: int, rows: Rows, topk: int, loss: LossOptions | None, parts: Parts = OURS) -> bool:
    """Whether :func:`sparse_attention` reads ``index``; if not, the indexer need not be run."""
    if _every_key_is_chosen(keys, rows, topk, parts):
        return loss is not None and (parts.loss is None or parts.choose is None)
    return parts.choose is None


def sparse_attention(
    operands: Operands,
    index: IndexInputs | None,
    topk: int,
    rows: Rows,
    groups: Groups,
    loss: LossOptions | None,
    backend: str,
    parts: Parts = OURS,
) -> Result:
    """Select keys for every row, attend to them, and compute the indexer loss.

    Args:
        operands: of the main attention.
        index: the indexer's query, key and weights; None if :func:`needs_index` says no.
        topk: keys per row.
        rows: which keys each row sees.
        groups: ranks with the other heads and the other rows.
        loss: the indexer loss; None for none.
        backend: of the operators.
        parts: code that replaces our operators.
    """
    if rows.end is not None:
        # Operators that know documents one behind the other, and nothing else, run as well.
        padding = operands.query.shape[0] - rows.end
        kept, of_kept = operands.first(rows.end), None if index is None else index.first(rows.end)
        result = sparse_attention(kept, of_kept, topk, rows.first(rows.end), groups, loss, backend, parts)
        return Result(F.pad(result.out, (0, 0, 0, 0, 0, padding)), result.loss)

    def choose() -> Selection:
        if parts.choose is not None:
            return parts.choose()
        return select_keys(_given(index), topk, rows, backend)

    if _every_key_is_chosen(operands.key.shape[0], rows, topk, parts):
        out = attend_densely(operands, rows, backend).out
        if loss is None:
            return Result(out, None)
        if parts.loss is not None:
            return Result(out, parts.loss(choose()))
        # Both forms of the loss are the dense one.
        return Result(out, dense_loss(operands, _given(index), rows, groups, loss, backend))

    with torch.set_grad_enabled(loss is not None):
        selection = choose()
    # Without a gradient for its scores there is no backward pass that could compute the loss.
    has_backward = operands.absorbed and selection.topk_scores.requires_grad
    if loss is not None and loss.in_backward is not None and loss.on_chosen_keys and has_backward:
        score_gradient = _loss_in_backward(selection, rows, groups, loss, loss.in_backward, backend)
        attended = attend_sparsely(
            operands,
            selection.topk_indices,
            backend,
            False,
            selection.topk_scores,
            score_gradient,
            form=selection.form,
        )
        return Result(attended.out, None)

    if parts.attend is not None:
        attended = parts.attend(selection)
    else:
        with_target = loss is not None and parts.loss is None and loss.on_chosen_keys
        attended = attend_to_chosen(operands, selection, rows, backend, with_target)
    if loss is None:
        return Result(attended.out, None)
    if parts.loss is not None:
        return Result(attended.out, parts.loss(selection))
    if loss.on_chosen_keys:
        return Result(attended.out, sparse_loss(operands, selection, attended, rows, groups, loss, backend))
    return Result(attended.out, dense_loss(operands, selection.inputs, rows, groups, loss, backend))


def select_keys(index: IndexInputs, topk: int, rows: Rows, backend: str, in_order: bool = False) -> Selection:
    """Select the keys of every row, by the operator.

    Args:
        index: the indexer's query, key and weights.
        topk: keys per row.
        rows: which keys each row sees.
        backend: of the operator.
        in_order: whether somebody reads the order of a row's keys, which are then ascending.
    """
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


def attend_to_chosen(
    operands: Operands, selection: Selection, rows: Rows, backend: str, with_target: bool
) -> Attended:
    """Main attention by the operator.

    Args:
        operands: query, key, value and scale.
        selection: the selected keys.
        rows: which of them count in the loss.
        backend: of the operator.
        with_target: also return the input of the sparse loss's target: the probabilities summed over heads,
        or, where the loss computes its own, ``lse`` alone.
    """
    inputs = selection.inputs
    if with_target and operands.absorbed and rows.counted is None and inputs.use_relu:
        query, topk = operands.query.transpose(0, 1), selection.topk_indices.shape[-1]
        with_target = not takes_lse(inputs.query, query, topk, backend=backend)
    return attend_sparsely(
        operands, selection.topk_indices, backend, with_sum=with_target, form=selection.form
    )


def _every_key_is_chosen(keys: int, rows: Rows, topk: int, parts: Parts) -> bool:
    """Whether no row sees more than ``topk`` keys, so that the attention is dense."""
    return parts.attend is None and rows.most_visible(keys) <= topk


def _loss_in_backward(
    selection: Selection,
    rows: Rows,
    groups: Groups,
    loss: LossOptions,
    report: Callable[[Tensor], Tensor],
    backend: str,
) -> Callable[[Tensor], Tensor]:
    """Callback of the attention's backward with its probabilities summed over heads."""
    scores = selection.topk_scores.detach()

    def score_gradient(attention_sum: Tensor) -> Tensor:
        reduction, factor = share_of_rank(loss, rows, groups)
        value, gradient = divergence_and_score_gradient(
            scores,
            attention_sum,
            selection.topk_indices,
            row_mask=rows.counted,
            reduction=reduction,
            tp_group=groups.tensor,
            backend=backend,
        )
        return gradient * (report(value * factor) * factor)

    return score_gradient


def _given(index: IndexInputs | None) -> IndexInputs:
    assert index is not None, "the caller goes by needs_index"
    return index
