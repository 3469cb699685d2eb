"""Repairs of the indexer loss in Megatron: unneeded computation, gradient scale, gradient share, log.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.indexer_loss import (
    LossTracker,
    coefficient,
    indexer_loss,
    with_zero_gradients,
)
from mindspeed_dsa.megatron.dsa import uses_dsa

# -- loss-gate: skip a loss with coefficient 0 ----------------------------------------------


class _Gate:
    """Flag that is set while an attention layer without an indexer loss runs."""

    def __init__(self, context: Context[None]) -> None:
        self.is_shut = False


def skip_unwanted_loss(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``DSAttention.forward`` to skip the indexer loss (as in evaluation) if it is not needed."""
    gate = context.state(_Gate)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        learns = self.training and torch.is_grad_enabled()
        if learns and coefficient(self.config) > 0:
            return original(self, *args, **kwargs)
        mode = self.training
        self.training = False  # of this module only; here it only decides whether there is a loss
        # Not set under no_grad: there is no graph to avoid, and code inside may enable one that it needs,
        # like the warm-up stage.
        before, gate.is_shut = gate.is_shut, torch.is_grad_enabled()
        try:
            output = original(self, *args, **kwargs)
        finally:
            gate.is_shut = before
            self.training = mode
        # A layer that shares a selection has no indexer.
        return with_zero_gradients(output, self.indexer) if learns and self.indexer is not None else output

    return forward


def score_without_graph(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``DSAIndexer.forward_with_scores`` to build no graph if the attention has no loss.

    Calls from outside of attention still build a graph, because they may need the gradient.
    """
    gate = context.state(_Gate)

    def forward_with_scores(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not gate.is_shut):
            return original(self, *args, **kwargs)

    return forward_with_scores


def keep_indexer_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DSAttention.forward``: give the indexer zero gradients if training has no indexer loss."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if not (self.training and torch.is_grad_enabled()) or coefficient(self.config) > 0:
            return output
        # A layer that shares a selection has no indexer.
        return output if self.indexer is None else with_zero_gradients(output, self.indexer)

    return forward


# -- loss-scale: set the gradient's scale where Megatron sets the scales of other losses ----


def indexer_loss_scale(config: Any, num_microbatches: int, cp_size: int, device: torch.device) -> Tensor:
    """Return the gradient scale of one microbatch's indexer loss, a scalar tensor.

    The factor is ``cp_size / num_microbatches``, times the fp16 loss scale. With
    ``calculate_per_token_loss`` it is the loss scale only, because Megatron later divides complete gradients
    by the number of tokens.
    """
    scale = torch.ones((), device=device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale).reshape(())
    # Megatron averages the main loss over microbatches. Data parallelism also averages over context parallel
    # ranks, but their shares of the indexer loss add up: multiply by cp_size.
    return scale if config.calculate_per_token_loss else scale * cp_size / num_microbatches


def set_indexer_loss_scale(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate the function that schedules call before each microbatch's backward: set the scale."""
    ours = indexer_loss(context.megatron)
    ours.sums_over_tokens = False  # reset the value of an earlier session
    signature = inspect.signature(original)

    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        config, cp_size = arguments["config"], arguments.get("cp_group_size")
        if uses_dsa(config):
            if cp_size is None:
                cp_size = context.megatron("core.parallel_state").get_context_parallel_world_size()
            output = result[0][0] if isinstance(result[0], (list, tuple)) else result[0]
            scale = indexer_loss_scale(config, arguments["num_microbatches"], cp_size, output.device)
            ours.scale.set_loss_scale(scale)
            ours.sums_over_tokens = config.calculate_per_token_loss
        return result

    return forward_step_calc_loss


def weigh_by_tokens(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``DSAIndexerLossAutoScaler.backward``: multiply the loss's gradient by the number of tokens.

    Only if gradients must be sums over tokens, and only for losses that Megatron's ``DSAttention.forward``
    attaches, which are means over the output's tokens.
    """
    ours = indexer_loss(context.megatron)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        grad_output, grad_loss = original(ctx, grad_output)
        if ours.sums_over_tokens:
            # grad_output is [s, b, heads * value_dim]
            sequence, batch = grad_output.shape[:2]
            grad_loss = grad_loss * (sequence * batch)
        return grad_output, grad_loss

    return backward


# -- cp-loss-grads: a context parallel rank's share of the gradient -------------------------
#
# Megatron multiplies the loss by the number of context parallel ranks, because data parallelism averages
# over them. That is right for sums divided by the rows of all ranks. But this loss is a mean over the rank's
# own rows. The logged loss is an average over ranks and right.

_OURS = "mindspeed"
"""Name of our kernel backend, whose loss already has the share's gradient."""


def start_with_share(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``FusedDSAIndexerLoss.backward`` to divide the loss gradient by the context parallel size."""

    def backward(ctx: Any, grad_topk_indices: Any, grad_loss: Tensor) -> Any:
        if not ctx.calculate_per_token_loss:
            grad_loss = grad_loss / _ranks(ctx.pg_collection)
        return original(ctx, grad_topk_indices, grad_loss)

    return backward


def share_of_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``dsa_kernels`` functions whose last result is a loss: divide its gradient by the CP size."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        config = kwargs["config"] if "config" in kwargs else args[0]
        ranks = _ranks(kwargs.get("pg_collection"))
        if result is None or ranks == 1 or config.dsa_kernel_backend == _OURS:
            return result
        *others, loss = result
        if loss is None or kwargs.get("calculate_per_token_loss"):
            return result
        return (*others, _Share.apply(loss, ranks))

    return run


class _Share(Function):
    """Identity whose backward divides the gradient by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def _ranks(groups: Any) -> int:
    """Return the context parallel size."""
    group = getattr(groups, "cp", None)
    return 1 if group is None else int(group.size())


# -- loss-tracker: replace the static methods of Megatron's tracker with ours ----------------


def _method_of_tracker(name: str) -> Callable[[Context[None]], Callable[..., None]]:
    """Return a factory of our replacement for a static method of ``DSAIndexerLossLoggingHelper``."""

    def make(context: Context[None]) -> Callable[..., None]:
        dsa = context.megatron("core.transformer.experimental_attention_variant.dsa")
        method = getattr(LossTracker(context.megatron, dsa.DSAIndexerLossLoggingHelper), name)

        def run(*args: Any, **kwargs: Any) -> None:
            method(*args, **kwargs)

        return run

    return make


save_loss = _method_of_tracker("save_loss_to_tracker")
clean_loss = _method_of_tracker("clean_loss_in_tracker")
reduce_loss = _method_of_tracker("reduce_loss_in_tracker")
track_metrics = _method_of_tracker("track_indexer_metrics")


def number_after_decoder(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionLayer.__init__`` to number its attention after the decoder layers."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        for module in self.modules():
            if hasattr(module, "indexer") and hasattr(module, "layer_number"):
                module.layer_number = config.num_layers + self.layer_number

    return __init__
