"""When the indexer loss is wanted, and zero gradients for when it is not."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def coefficient(config: Any) -> float:
    """``dsa_indexer_loss_coeff``; none and negative ones mean no loss."""
    return max(config.dsa_indexer_loss_coeff or 0.0, 0.0)


class _ZeroGradients(torch.autograd.Function):
    """Identity on the output; in backward the parameters get gradients that are exactly zero."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        return grad_output, *(torch.zeros_like(parameter) for parameter in ctx.parameters)


def with_zero_gradients(output: Tensor, module: torch.nn.Module) -> Tensor:
    """``output``, through which the module's trainable parameters get zero gradients.

    Megatron's overlapped gradient reduction starts a bucket when all its parameters have a gradient; one
    that never gets any would make the step fail.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return _ZeroGradients.apply(output, *parameters) if parameters else output


_without_loss: ContextVar[bool] = ContextVar("_without_loss", default=False)
"""True while an attention layer without indexer loss runs."""


def skip_unwanted_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DSAttention.forward``: its evaluation path is the path without the loss."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        learns = self.training and torch.is_grad_enabled()
        if learns and coefficient(self.config) > 0:
            return original(self, *args, **kwargs)
        mode = self.training
        self.training = False  # of this module alone; all that it decides here is whether there is a loss
        token = _without_loss.set(True)
        try:
            output = original(self, *args, **kwargs)
        finally:
            _without_loss.reset(token)
            self.training = mode
        return with_zero_gradients(output, self.indexer) if learns else output

    return forward


def keep_indexer_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a ``DSAttention.forward`` that skips the unwanted loss by itself."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if not (self.training and torch.is_grad_enabled()) or coefficient(self.config) > 0:
            return output
        # A layer that reuses another layer's selection has no indexer.
        return output if self.indexer is None else with_zero_gradients(output, self.indexer)

    return forward


def score_without_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DSAIndexer.forward_with_scores``: in attention, only the loss needs the scores' graph.

    Whoever else asks for scores may have a use for their gradient.
    """

    def forward_with_scores(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not _without_loss.get()):
            return original(self, *args, **kwargs)

    return forward_with_scores
