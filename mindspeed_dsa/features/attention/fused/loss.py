"""The indexer loss, on the operator or on Megatron's own code, and how it joins the training.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.features.attention.dsa_module import dsa_module
from mindspeed_dsa.features.attention.fused.attend import (
    Attended,
    Operands,
    attention_sum_by_head,
    expanded_key,
)
from mindspeed_dsa.features.attention.fused.indexer import IndexInputs, Selection, for_host, host_scores
from mindspeed_dsa.features.attention.loss_gate_impl import coefficient
from mindspeed_dsa.features.attention.loss_scale_impl import AttachedLoss, gradient_of_loss
from mindspeed_dsa.ops.indexer_kl_loss import (
    dense_indexer_kl_loss,
    divergence_and_score_gradient,
    indexer_kl_loss,
)


def tensor_parallel_group(attention: Any) -> ProcessGroup | None:
    """The ranks that hold the other heads, if there are any."""
    group: ProcessGroup = attention.indexer.pg_collection.tp
    return group if group.size() > 1 else None


def rows_of_sequence(operands: Operands) -> int:
    """By how many rows the loss is divided: those of whole sequences, each of which has a key."""
    keys, batch = operands.key.shape[:2]
    return keys * batch


def share_of_mean(attention: Any) -> float:
    """What a mean over a rank's own rows is multiplied by, the loss's coefficient included.

    Context parallel ranks hold equally many rows of a sequence. One over their number makes a rank's mean the
    sum over its rows divided by :func:`rows_of_sequence`, so that losses, and their gradients, add up over
    ranks to those of the whole sequence.
    """
    group: ProcessGroup = attention.indexer.pg_collection.cp
    return coefficient(attention.config) / group.size()


def sparse_loss(
    attention: Any, operands: Operands, selection: Selection, attended: Attended, backend: str
) -> Tensor:
    """Both distributions on the chosen keys; this rank's share, a scalar, the coefficient included."""
    query, key = _detached(operands)
    attention_sum = attended.attention_sum
    if attention_sum is None and not operands.absorbed:
        attention_sum = attention_sum_by_head(operands, selection.topk_indices, backend)
    inputs = selection.inputs
    loss = indexer_kl_loss(
        inputs.query,
        inputs.key,
        inputs.weights,
        query,
        # With the sum at hand the key is not read, and heads with keys of their own have no single one.
        key if key.dim() == 3 else key[:, :, 0],
        selection.topk_indices,
        operands.softmax_scale,
        lse=attended.lse,
        topk_scores=selection.topk_scores,
        attention_sum=attention_sum,
        tp_group=tensor_parallel_group(attention),
        backend=backend,
    )
    return loss * share_of_mean(attention)


def dense_loss(attention: Any, operands: Operands, inputs: IndexInputs, backend: str) -> Tensor:
    """Both distributions on the whole causal prefix; otherwise as :func:`sparse_loss`."""
    loss = dense_indexer_kl_loss(
        inputs.query,
        inputs.key,
        inputs.weights,
        *_detached(operands),
        operands.softmax_scale,
        ends=operands.ends,
        tp_group=tensor_parallel_group(attention),
        backend=backend,
    )
    return loss * share_of_mean(attention)


def _detached(operands: Operands) -> tuple[Tensor, Tensor]:
    """Query ``[b, s, heads, dim]`` and key ``[b, s, dim]`` or ``[b, s, heads, dim]``, constants here."""
    key = operands.key.detach().transpose(0, 1)
    return operands.query.detach().transpose(0, 1), key.squeeze(2) if operands.absorbed else key


def host_loss(attention: Any, operands: Operands, selection: Selection) -> Tensor:
    """Megatron's ``compute_dsa_indexer_loss``: holds ``[b, heads, s, s]``."""
    dsa = dsa_module()
    scores = selection.scores
    if scores is None:
        scores = host_scores(attention.indexer, selection.inputs)
    key = expanded_key(operands) if operands.absorbed else operands.key
    loss: Tensor = dsa.compute_dsa_indexer_loss(
        scores,
        for_host(selection.topk_indices),
        operands.query.detach(),
        key.detach(),
        operands.softmax_scale,
        coefficient(attention.config),
        attention.config.dsa_indexer_use_sparse_loss,
        attention.indexer.pg_collection,
    )
    return loss


def log_loss(attention: Any, loss: Tensor) -> None:
    """Hand this rank's share of the layer's loss to Megatron's tracker."""
    group = attention.indexer.pg_collection.cp
    dsa_module().DSAIndexerLossLoggingHelper.save_loss_to_tracker(
        loss=loss,
        layer_number=attention.layer_number,
        num_layers=attention.config.num_layers,
        reduce_group=group if group.size() > 1 else None,
    )


def attach_loss(attention: Any, operands: Operands, out: Tensor, loss: Tensor) -> Tensor:
    """``out``, through whose backward the loss gets its gradient, scaled as Megatron's own is."""
    log_loss(attention, loss)
    return AttachedLoss.apply(out, loss, rows_of_sequence(operands))  # type: ignore[no-any-return]


def score_gradient_in_backward(
    attention: Any, operands: Operands, selection: Selection, backend: str
) -> Callable[[Tensor], Tensor]:
    """What the attention's backward calls when it has summed its probabilities over heads.

    The loss is logged then, and its gradient gets the scale that Megatron's scaler would give it.
    """
    scores, rows = selection.topk_scores.detach(), rows_of_sequence(operands)

    def score_gradient(attention_sum: Tensor) -> Tensor:
        loss, gradient = divergence_and_score_gradient(
            scores,
            attention_sum,
            selection.topk_indices,
            tp_group=tensor_parallel_group(attention),
            backend=backend,
        )
        share = share_of_mean(attention)
        log_loss(attention, loss * share)
        return gradient * (gradient_of_loss(loss, rows) * share)

    return score_gradient
