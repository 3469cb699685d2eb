"""The warm-up stage: dense attention, the indexer loss over the whole prefix, only indexers trained.

No gradient flows through the frozen model. Each layer runs without a graph; its indexer's loss, which has a
graph of its own, hangs on the layer's output, and the backward pass walks from output to output with zeros
(DeepSeek-V3.2-Exp report, section 2.1.1).

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.features.attention.fused.attend import Operands, attend_densely
from mindspeed_dsa.features.attention.fused.indexer import index_inputs
from mindspeed_dsa.features.attention.fused.loss import dense_loss, log_loss, rows_of_sequence
from mindspeed_dsa.features.attention.loss_gate_impl import coefficient
from mindspeed_dsa.features.attention.loss_scale_impl import AttachedLoss
from mindspeed_dsa.features.host import host

_losses: ContextVar[list[tuple[Tensor, int]] | None] = ContextVar("_losses", default=None)
"""Where the running layer's attention leaves its indexer loss and the rows that this was divided by; None
where no loss is wanted."""


def freeze_all_but_indexers(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``GPTModel.__init__``: data parallelism and optimizer then leave frozen parameters out."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        dsa = host("core.transformer.experimental_attention_variant.dsa")
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, dsa.DSAIndexer):
                module.requires_grad_(True)
            if getattr(module, "recompute_input_layernorm", False):
                # A layer without a graph keeps nothing but the norm's output, for its indexer; recomputation
                # would empty that and, without a gradient to wait for, never fill it again.
                module.recompute_input_layernorm = False
        embedding = getattr(self, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(_start_graph)

    return __init__


def _start_graph(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Activation checkpointing runs a layer's backward only if its input wants a gradient."""
    return output.detach().requires_grad_(torch.is_grad_enabled())


class _WithoutGraph(torch.autograd.Function):
    """A layer's output, made without a graph, in the place of one that depends on the layer's input."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden_states: Tensor) -> Tensor:
        ctx.like = hidden_states
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor]:
        return None, torch.zeros_like(ctx.like)


def layer_without_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerLayer.forward``."""

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
            output = AttachedLoss.apply(output, loss, rows)
        return (output, *rest) if isinstance(result, tuple) else output

    return forward


def attention(attention: Any, operands: Operands, x: Tensor, qr: Tensor, backend: str) -> Tensor:
    """Dense causal attention; the indexer's loss goes to the layer that asked for it."""
    losses = _losses.get()
    if losses is not None and coefficient(attention.config) > 0:
        with torch.enable_grad():
            inputs = index_inputs(attention.indexer, x, qr, operands.key.shape[0])
            loss = dense_loss(attention, operands, inputs, backend)
        log_loss(attention, loss)
        losses.append((loss, rows_of_sequence(operands)))
    return attend_densely(operands, backend).out
