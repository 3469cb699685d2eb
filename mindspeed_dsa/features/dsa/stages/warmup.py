"""Warm-up stage: dense attention, indexer loss over all visible keys, and only indexers are trained.

The rest of the model is frozen, so each layer runs without a graph (DeepSeek-V3.2-Exp report, section 2.1.1).
The layer's indexer loss has a graph of its own, which is attached to the layer's output. Backward propagates
only zeros from layer to layer, to reach these graphs.

Imports Megatron only when called, because these functions are loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.call import Call
from mindspeed_dsa.features.dsa.indexer_loss import coefficient, indexer_loss
from mindspeed_dsa.features.dsa.loss import dense_loss
from mindspeed_dsa.features.dsa.main_attention import attend_densely
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import IndexInputs, LossOptions, Problem, Rows
from mindspeed_dsa.features.dsa.served import (
    hand_on_inputs,
    log_divisor,
    served_dense_loss,
    serving_of,
    weight_of,
)
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.megatron.selection_source import current, place_of
from mindspeed_dsa.megatron.served_index import Delivery
from mindspeed_dsa.ops.graph import with_backward_of

_ATTACHMENTS = "_mindspeed_dsa_attachments"
"""Attribute of a running warm-up layer's core attention: functions that attach losses to the output."""


def attachments_of(attention: Any) -> list[Callable[[Tensor], Tensor]] | None:
    """Return the list of functions that attach losses to a layer's output; ``None`` outside of warm-up."""
    return getattr(attention, _ATTACHMENTS, None)


def collect_graph(attention: Any, attended: Tensor) -> None:
    """Attach the graph of a core attention's output, with its indexer loss, to the layer's output."""
    attachments = attachments_of(attention)
    if attachments is not None and attended.requires_grad:
        attachments.append(lambda output: with_backward_of(output, attended))


def layer_without_graph(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward``: run it without a graph, and attach the indexer loss."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return original(self, hidden_states, *args, **kwargs)
        attachments: list[Callable[[Tensor], Tensor]] = []
        attention = getattr(self.self_attention, "core_attention", self)
        setattr(attention, _ATTACHMENTS, attachments)
        try:
            with torch.no_grad():
                result = original(self, hidden_states, *args, **kwargs)
        finally:
            delattr(attention, _ATTACHMENTS)
        output, *rest = result if isinstance(result, tuple) else (result,)
        # Keep the chain from layer to layer, through which backward reaches the losses of lower layers.
        output = with_backward_of(output, hidden_states)
        for attach in attachments:
            output = attach(output)
        # Like Megatron's own layers: the pipeline frees the last layer's output, which must not be a view.
        utils = context.megatron("core.utils")
        output = utils.make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True)
        return (output, *rest) if isinstance(result, tuple) else output

    return forward


def attend(call: Call, operands: Operands, rows: Rows, index: Callable[[], IndexInputs]) -> Tensor:
    """Compute attention to all visible keys. In warm-up, attach the indexer loss to the layer's output.

    Args:
        call: arguments of the core attention. A layer without an indexer has no loss.
        operands: operands of the main attention.
        rows: range of keys that each query token sees.
        index: function that returns the indexer's inputs, called only if there is a loss.
    """
    layer, backend = call.layer, call.options.backend
    attachments, ours = attachments_of(layer), indexer_loss(call.megatron)
    wanted = LossOptions(
        coefficient(layer.config) * weight_of(call),
        on_chosen_keys=False,
        per_token=ours.takes_sums(layer.config),
    )
    problem = Problem(operands, layer.config.dsa_indexer_topk, rows, call.groups, wanted, backend)
    loss, deliveries = _loss(call, problem, index, attachments is not None and wanted.coefficient > 0)
    if loss is not None and attachments is not None:
        ours.log(loss / log_divisor(call), layer, call.groups.context)
        all_rows = operands.key.shape[0] * operands.key.shape[1] if rows.count is None else rows.count
        attachments.append(partial(ours.attach, loss=loss, rows=all_rows, deliveries=deliveries))
    return attend_densely(operands, rows, backend).out


def _loss(
    call: Call, problem: Problem, index: Callable[[], IndexInputs], has_loss: bool
) -> tuple[Tensor | None, tuple[Delivery, ...]]:
    """Return the layer's indexer loss, and its gradients if it trains another layer's indexer.

    A layer without an indexer has a loss only if the indexer below learns all layers that it serves.

    Raises:
        RuntimeError: such a layer runs, and the layer of its indexer has not run before it.
    """
    place, selections, serving = place_of(call.layer), current(), serving_of(call)
    # Without losses of layers that share, nothing is handed on, and nothing is missing.
    is_needed = has_loss and call.options.learns_served
    if place is not None and (selections.latest is not None or is_needed) and selections.is_shared_by(place):
        (served,) = selections.read(place).index
        selections.release(place)
        if not has_loss or served is None:
            return None, ()
        loss, gradients = served_dense_loss(problem, served)
        return loss, (served.delivery(gradients),)
    if call.layer.indexer is None or not (has_loss or serving is not None):
        return None, ()
    with torch.set_grad_enabled(has_loss):
        inputs = index()
        if place is not None and serving is not None:
            served, inputs = hand_on_inputs(serving, inputs)
            selections.store(place, None, index=(served,))
        return dense_loss(problem, inputs) if has_loss else None, ()
