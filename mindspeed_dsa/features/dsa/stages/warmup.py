"""Warm-up stage: dense attention, indexer loss over all visible keys, and only indexers are trained.

The rest of the model is frozen, so each layer runs without a graph (DeepSeek-V3.2-Exp report, section 2.1.1).
The layer's indexer loss has a graph of its own, which is attached to the layer's output. Backward propagates
only zeros from layer to layer, to reach these graphs.

Imports Megatron only when called, because these functions are loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.call import Call
from mindspeed_dsa.features.dsa.indexer_loss import coefficient, indexer_loss
from mindspeed_dsa.features.dsa.loss import dense_loss
from mindspeed_dsa.features.dsa.main_attention import attend_densely
from mindspeed_dsa.features.dsa.problem import IndexInputs, LossOptions, Operands, Problem, Rows
from mindspeed_dsa.megatron.dsa import Options
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
    attachments, layer, backend = attachments_of(call.layer), call.layer, call.options.backend
    weight = coefficient(layer.config)
    if attachments is not None and weight > 0 and layer.indexer is not None:
        wanted = LossOptions(weight, on_chosen_keys=False)
        problem = Problem(operands, layer.config.dsa_indexer_topk, rows, call.groups, wanted, backend)
        with torch.enable_grad():
            loss = dense_loss(problem, index())
        ours = indexer_loss(call.megatron)
        ours.log(loss, layer, call.groups.context)
        all_rows = operands.key.shape[0] * operands.key.shape[1] if rows.count is None else rows.count
        attachments.append(lambda output: ours.attach(output, loss, all_rows))
    return attend_densely(operands, rows, backend).out
