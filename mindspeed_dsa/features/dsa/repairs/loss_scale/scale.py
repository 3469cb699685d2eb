"""The scale of the indexer loss's gradient, set where Megatron sets that of its other auxiliary losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.indexer_loss import indexer_loss


def indexer_loss_scale(config: Any, num_microbatches: int, cp_size: int, device: torch.device) -> Tensor:
    """Factor of the gradient of one microbatch's indexer loss; a scalar tensor.

    Megatron averages the main loss over microbatches. Data parallelism averages gradients over context
    parallel ranks too, whose shares of the loss add up, hence the factor of their number. With
    ``calculate_per_token_loss`` Megatron divides by the number of tokens instead, when all gradients are
    complete.
    """
    scale = torch.ones((), device=device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale).reshape(())
    return scale if config.calculate_per_token_loss else scale * cp_size / num_microbatches


def set_indexer_loss_scale(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate the function that every schedule runs once per microbatch, before its backward."""
    ours = indexer_loss(context.megatron)
    ours.sums_over_tokens = False  # an earlier session's
    signature = inspect.signature(original)

    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        config, cp_size = given["config"], given.get("cp_group_size")
        if getattr(config, "experimental_attention_variant", None) == "dsa":
            if cp_size is None:
                cp_size = context.megatron("core.parallel_state").get_context_parallel_world_size()
            output = result[0][0] if isinstance(result[0], (list, tuple)) else result[0]
            scale = indexer_loss_scale(config, given["num_microbatches"], cp_size, output.device)
            ours.scale.set_loss_scale(scale)
            ours.sums_over_tokens = config.calculate_per_token_loss
        return result

    return forward_step_calc_loss


def weigh_by_tokens(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``DSAIndexerLossAutoScaler.backward``: where sums over tokens are expected, sum.

    For losses that Megatron's own ``DSAttention.forward`` attaches, which are means over its output's rows.
    """
    ours = indexer_loss(context.megatron)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        grad_output, grad_loss = original(ctx, grad_output)
        if ours.sums_over_tokens:
            sequence, batch = grad_output.shape[:2]
            grad_loss = grad_loss * (sequence * batch)
        return grad_output, grad_loss

    return backward
