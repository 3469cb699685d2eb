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
from torch.autograd.function import once_differentiable

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.call import Call
from mindspeed_dsa.features.dsa.indexer_loss import coefficient, indexer_loss
from mindspeed_dsa.features.dsa.loss import dense_loss
from mindspeed_dsa.features.dsa.main_attention import attend_densely
from mindspeed_dsa.features.dsa.problem import IndexInputs, LossOptions, Operands, Problem, Rows
from mindspeed_dsa.megatron.dsa import Options

_losses: ContextVar[list[tuple[Tensor, int]] | None] = ContextVar("_losses", default=None)
"""The running layer's indexer loss and the number of rows it was divided by; None if there is no loss."""


def freeze_all_but_indexers(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``GPTModel.__init__``: data parallelism and optimizer then skip frozen parameters."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        dsa = context.megatron("core.transformer.experimental_attention_variant.dsa")
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, dsa.DSAIndexer):
                module.requires_grad_(True)
            if getattr(module, "recompute_input_layernorm", False):
                # A layer without a graph saves only the norm's output, for its indexer; recomputation
                # would free that and, without a gradient that triggers it, never restore it.
                module.recompute_input_layernorm = False
        embedding = getattr(self, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(_start_graph)

    return __init__


def _start_graph(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Let the graph begin here: checkpointing runs a layer's backward only if its input has a gradient."""
    return output.detach().requires_grad_(torch.is_grad_enabled())


class _WithoutGraph(torch.autograd.Function):
    """Output of a layer, computed without a graph, that depends on the layer's input."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden_states: Tensor) -> Tensor:
        ctx.like = hidden_states
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor]:
        return None, torch.zeros_like(ctx.like)


def layer_without_graph(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward``: run it without a graph, and attach its indexer's loss."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return original(self, hidden_states, *args, **kwargs)
        losses: list[tuple[Tensor, int]] = []
        token = _losses.set(losses)
        try:
            with torch.no_grad():
                result = original(self, hidden_states, *args, **kwargs)
        finally:
            _losses.reset(token)
        output, *rest = result if isinstance(result, tuple) else (result,)
        output = _WithoutGraph.apply(output, hidden_states)
        for loss, rows in losses:
            output = indexer_loss(context.megatron).attach(output, loss, rows)
        # As Megatron's own layers end: a pipeline frees the last layer's output, which must not be a view.
        utils = context.megatron("core.utils")
        output = utils.make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True)
        return (output, *rest) if isinstance(result, tuple) else output

    return forward


def attend(call: Call, operands: Operands, rows: Rows, index: Callable[[], IndexInputs]) -> Tensor:
    """Attend to all visible keys; the indexer loss is passed to the running layer.

    Args:
        call: of the core attention.
        operands: of the main attention.
        rows: which keys each row sees.
        index: projects for the indexer; called where there is a loss.
    """
    losses, layer, backend = _losses.get(), call.layer, call.options.backend
    weight = coefficient(layer.config)
    if losses is not None and weight > 0:
        wanted = LossOptions(weight, on_chosen_keys=False)
        problem = Problem(operands, layer.indexer.index_topk, rows, call.groups, wanted, backend)
        with torch.enable_grad():
            loss = dense_loss(problem, index())
        indexer_loss(call.megatron).log(loss, layer, call.groups.context)
        all_rows = operands.key.shape[0] * operands.key.shape[1]
        losses.append((loss, all_rows if rows.count is None else rows.count))
    return attend_densely(operands, rows, backend).out
