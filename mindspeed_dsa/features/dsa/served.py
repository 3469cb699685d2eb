"""Losses of layers that share a selection, which train the indexer that selected (``served``).

:mod:`mindspeed_dsa.megatron.served_index` brings their gradients to the layer of that indexer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mindspeed_dsa.features.dsa.call import Call
from mindspeed_dsa.features.dsa.indexer_loss import coefficient
from mindspeed_dsa.features.dsa.loss import dense_loss, share_of_rank
from mindspeed_dsa.features.dsa.problem import IndexInputs, Problem
from mindspeed_dsa.megatron.dsa import SERVED
from mindspeed_dsa.megatron.selection_source import current, place_of
from mindspeed_dsa.megatron.served_index import ServedIndex, Serving
from mindspeed_dsa.ops.indexer_kl_loss import divergence_and_score_gradient


def weight_of(call: Call) -> float:
    """Return the weight of a layer's loss among the losses of all layers that its indexer serves."""
    place = place_of(call.layer)
    # 4 layers, served by one indexer: a weight of 1/4 each, so that they weigh as one layer.
    return 1.0 if place is None or call.options.loss_layers != SERVED else 1.0 / place.served


def log_divisor(call: Call) -> float:
    """Return the divisor of a layer's losses in the log, which shows their mean without :func:`weight_of`."""
    place, weight = place_of(call.layer), weight_of(call)
    # A layer that repeats has a loss in each of its runs, and one entry of the log.
    repeats = place is not None and place.repeats and call.options.learns_served
    return weight * place.served if place is not None and repeats else weight


def serving_of(call: Call) -> Serving | None:
    """Return what a layer hands on for the losses of the layers above; None if these have no loss."""
    layer, place = call.layer, place_of(call.layer)
    if place is None or not place.hands_on or not call.options.learns_served:
        return None
    # Also without gradients: layers above may be recomputed after this first run of a checkpoint. The indexer
    # knows whether the model trains; the attention's own flag is off where it has no loss itself.
    if layer.indexer is None or not layer.indexer.training or coefficient(layer.config) == 0:
        return None
    over_chosen = layer.config.dsa_indexer_use_sparse_loss and not call.options.attends_densely
    return Serving(current().gradients_for(place), scores=over_chosen)


def hand_on_inputs(serving: Serving, index: IndexInputs) -> tuple[ServedIndex, IndexInputs]:
    """Return inputs of the indexer for the losses of other layers, and for the layer's own dense loss."""
    served, (query, key, weights) = serving.hand_on(
        index.query, index.key, index.weights, use_relu=index.use_relu
    )
    return served, replace(index, query=query, key=key, weights=weights)


def served_sparse_loss(
    problem: Problem, scores: Tensor, attention_sum: Tensor, topk_indices: Tensor
) -> tuple[Tensor, tuple[Tensor]]:
    """Compute the loss of another layer's indexer on a selection that this layer shares.

    Args:
        problem: sparse attention of the layer that shares.
        scores: index scores of the selected keys, ``[b, s, topk]``.
        attention_sum: probabilities of the selected keys, summed over this rank's heads, ``[b, s, topk]``.
        topk_indices: selected keys, ``[b, s, topk]``.

    Returns:
        The loss as of :func:`sparse_loss`, without a graph, and its gradient with respect to the scores.
    """
    reduction, factor = share_of_rank(problem.wanted, problem.rows, problem.groups)
    value, gradient = divergence_and_score_gradient(
        scores,
        attention_sum,
        topk_indices,
        row_mask=problem.rows.counted,
        reduction=reduction,
        tp_group=problem.groups.tensor,
        backend=problem.backend,
    )
    return value * factor, (gradient * factor,)


def served_dense_loss(problem: Problem, served: ServedIndex) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute the loss of another layer's indexer on all visible keys.

    Args:
        problem: attention of the layer that shares.
        served: query, key and weights of the other layer's indexer.

    Returns:
        The loss as of :func:`dense_loss`, without a graph, and its gradients with respect to the three, fp32
        where these are fp16.
    """
    with torch.enable_grad():
        query, key, weights = (one.detach().requires_grad_() for one in served.outputs)
        loss = dense_loss(problem, IndexInputs(query, key, weights, served.use_relu))
    # The loss scale only comes in backward, and until then fp16 gradients of a mean would underflow. A power
    # of two near the number of tokens makes them gradients of a sum.
    is_raised = query.dtype == torch.float16 and not problem.wanted.per_token
    raised = float(2 ** weights[..., 0].numel().bit_length()) if is_raised else 1.0
    gradients = torch.autograd.grad(loss, (query, key, weights), torch.full_like(loss, raised))
    return loss.detach(), tuple(one.float() / raised if is_raised else one for one in gradients)
