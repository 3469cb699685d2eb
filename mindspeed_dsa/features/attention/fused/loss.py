"""The indexer loss, on the operator or on Megatron's own code, and how it joins the training.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
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
from mindspeed_dsa.ops.indexer_kl_loss import (
    dense_indexer_kl_loss,
    divergence_and_score_gradient,
    indexer_kl_loss,
)


def tensor_parallel_group(attention: Any) -> ProcessGroup | None:
    """The ranks that hold the other heads, if there are any."""
    group: ProcessGroup = attention.indexer.pg_collection.tp
    return group if group.size() > 1 else None


def sparse_loss(
    attention: Any, operands: Operands, selection: Selection, attended: Attended, backend: str
) -> Tensor:
    """Both distributions on the chosen keys; a scalar, the coefficient included."""
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
    return loss * coefficient(attention.config)


def dense_loss(attention: Any, operands: Operands, inputs: IndexInputs, backend: str) -> Tensor:
    """Both distributions on the whole causal prefix; a scalar, the coefficient included."""
    loss = dense_indexer_kl_loss(
        inputs.query,
        inputs.key,
        inputs.weights,
        *_detached(operands),
        operands.softmax_scale,
        tp_group=tensor_parallel_group(attention),
        backend=backend,
    )
    return loss * coefficient(attention.config)


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
    """Hand the layer's loss to Megatron's tracker."""
    dsa = dsa_module()
    dsa.DSAIndexerLossLoggingHelper.save_loss_to_tracker(
        loss=loss, layer_number=attention.layer_number, num_layers=attention.config.num_layers
    )


def attach_loss(attention: Any, out: Tensor, loss: Tensor) -> Tensor:
    """``out``, through whose backward the loss gets its gradient, scaled as Megatron's own is."""
    log_loss(attention, loss)
    dsa = dsa_module()
    return dsa.DSAIndexerLossAutoScaler.apply(out, loss)  # type: ignore[no-any-return]


def score_gradient_in_backward(
    attention: Any, selection: Selection, backend: str
) -> Callable[[Tensor], Tensor]:
    """What the attention's backward calls when it has summed its probabilities over heads.

    The loss is logged then, and its gradient gets the scale that Megatron's scaler would give it.
    """
    dsa = dsa_module()
    scores = selection.topk_scores.detach()
    batch, length = scores.shape[:2]

    def score_gradient(attention_sum: Tensor) -> Tensor:
        loss, gradient = divergence_and_score_gradient(
            scores,
            attention_sum,
            selection.topk_indices,
            tp_group=tensor_parallel_group(attention),
            backend=backend,
        )
        weight = coefficient(attention.config)
        log_loss(attention, loss * weight)
        # The scaler reads the shape of the output's gradient, to turn means over tokens into sums.
        output_gradient = torch.empty(length, batch, 0, device=scores.device)
        context = SimpleNamespace(saved_tensors=(loss,))
        _, scale = dsa.DSAIndexerLossAutoScaler.backward(context, output_gradient)
        scaled: Tensor = gradient * (scale * weight)
        return scaled

    return score_gradient
