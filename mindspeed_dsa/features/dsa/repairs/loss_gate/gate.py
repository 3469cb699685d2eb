"""Skips an indexer loss that is not used."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from mindspeed_dsa.features.dsa.indexer_loss import coefficient
from mindspeed_dsa.features.dsa.zero_gradients import with_zero_gradients

_without_loss: ContextVar[bool] = ContextVar("_without_loss", default=False)
"""True while an attention layer without indexer loss runs."""


def skip_unwanted_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DSAttention.forward``: its evaluation path is the path without the loss."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        learns = self.training and torch.is_grad_enabled()
        if learns and coefficient(self.config) > 0:
            return original(self, *args, **kwargs)
        mode = self.training
        self.training = False  # of this module only; here it only decides whether there is a loss
        # Under no_grad there is no graph to save, and code that enables one inside, like the warm-up stage,
        # needs it.
        token = _without_loss.set(torch.is_grad_enabled())
        try:
            output = original(self, *args, **kwargs)
        finally:
            _without_loss.reset(token)
            self.training = mode
        return with_zero_gradients(output, self.indexer) if learns else output

    return forward


def keep_indexer_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a ``DSAttention.forward`` that skips the unused loss by itself."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if not (self.training and torch.is_grad_enabled()) or coefficient(self.config) > 0:
            return output
        # A layer that reuses another layer's selection has no indexer.
        return output if self.indexer is None else with_zero_gradients(output, self.indexer)

    return forward


def score_without_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DSAIndexer.forward_with_scores``: in attention, only the loss needs the scores' graph.

    Other callers of the scores may need their gradient.
    """

    def forward_with_scores(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not _without_loss.get()):
            return original(self, *args, **kwargs)

    return forward_with_scores
