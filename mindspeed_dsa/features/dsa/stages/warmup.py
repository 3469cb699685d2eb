"""Warm-up stage: dense attention, the indexer loss over the whole prefix, only indexers trained.

No gradient flows through the frozen model. Each layer runs without a graph; its indexer's loss, which has a
separate graph, is attached to the layer's output, and the backward pass propagates zeros from output to
output (DeepSeek-V3.2-Exp report, section 2.1.1).

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
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

_attachments: ContextVar[list[Callable[[Tensor], Tensor]] | None] = ContextVar("_attachments", default=None)
"""Functions that attach the running layer's indexer losses to its output; None if there is no loss."""


def collects() -> bool:
    """Return whether a layer runs whose indexer loss is wanted."""
    return _attachments.get() is not None


def collect_graph(attended: Tensor) -> None:
    """Attach what carries an indexer loss, a core attention's output, to the output of the running layer."""
    attachments = _attachments.get()
    if attachments is not None and attended.requires_grad:
        attachments.append(lambda output: with_backward_of(output, attended))


def layer_without_graph(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward``: run it without a graph, and attach its indexer's loss."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return original(self, hidden_states, *args, **kwargs)
        attachments: list[Callable[[Tensor], Tensor]] = []
        token = _attachments.set(attachments)
        try:
            with torch.no_grad():
                result = original(self, hidden_states, *args, **kwargs)
        finally:
            _attachments.reset(token)
        output, *rest = result if isinstance(result, tuple) else (result,)
        output = with_backward_of(output, hidden_states)
        for attach in attachments:
            output = attach(output)
        # As Megatron's own layers end: a pipeline frees the last layer's output, which must not be a view.
        utils = context.megatron("core.utils")
        output = utils.make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True)
        return (output, *rest) if isinstance(result, tuple) else output

    return forward


def attend(call: Call, operands: Operands, rows: Rows, index: Callable[[], IndexInputs]) -> Tensor:
    """Attend to all visible keys; in the warm-up the indexer loss is passed to the running layer.

    Args:
        call: of the core attention; its layer has no loss if it has no indexer.
        operands: of the main attention.
        rows: which keys each row sees.
        index: projects for the indexer; called where there is a loss.
    """
    attachments, layer, backend = _attachments.get(), call.layer, call.options.backend
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
