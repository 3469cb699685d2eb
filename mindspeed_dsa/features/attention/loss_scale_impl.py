"""The scale of the indexer loss's gradient, set where Megatron sets that of its other side losses.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.features.attention.dsa_module import dsa_module
from mindspeed_dsa.features.host import host

_sums_over_tokens = False
"""Whether gradients are sums over tokens, to be divided by their number when the step is complete.

Belongs to the process, like the scale itself: set in every forward step, read in backward."""


def indexer_loss_scale(config: Any, num_microbatches: int, cp_size: int, device: torch.device) -> Tensor:
    """What the gradient of one microbatch's indexer loss is multiplied by; a scalar tensor.

    Megatron averages the main loss over microbatches. Data parallelism averages gradients over context
    parallel ranks too, whose shares of the loss add up: hence their number. With
    ``calculate_per_token_loss`` Megatron divides by the number of tokens instead, when all gradients are
    there.
    """
    scale = torch.ones((), device=device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale).reshape(())
    return scale if config.calculate_per_token_loss else scale * cp_size / num_microbatches


def set_indexer_loss_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    """Every schedule runs this function once a microbatch, before that microbatch's backward."""
    global _sums_over_tokens
    _sums_over_tokens = False  # an earlier session's
    signature = inspect.signature(original)

    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        global _sums_over_tokens
        result = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        config, cp_size = given["config"], given.get("cp_group_size")
        if getattr(config, "experimental_attention_variant", None) == "dsa":
            if cp_size is None:
                cp_size = host("core.parallel_state").get_context_parallel_world_size()
            output = result[0][0] if isinstance(result[0], (list, tuple)) else result[0]
            scale = indexer_loss_scale(config, given["num_microbatches"], cp_size, output.device)
            dsa_module().DSAIndexerLossAutoScaler.set_loss_scale(scale)
            _sums_over_tokens = config.calculate_per_token_loss
        return result

    return forward_step_calc_loss


def gradient_of_loss(loss: Tensor, rows: int) -> Tensor:
    """The gradient that an indexer loss starts its backward pass with.

    Args:
        loss: scalar, a rank's sum over its rows divided by ``rows``.
        rows: of the whole microbatch, over all context parallel ranks.

    Returns:
        Scalar: the scale that was set for Megatron's own losses, times ``rows`` where the schedule expects
        sums.
    """
    scale = dsa_module().DSAIndexerLossAutoScaler.main_loss_backward_scale
    gradient = torch.ones_like(loss)
    if scale is not None:
        gradient = gradient * scale.to(loss.device)
    return gradient * rows if _sums_over_tokens else gradient


class AttachedLoss(torch.autograd.Function):
    """Identity on the output; in backward the indexer loss gets its gradient.

    Megatron's ``DSAIndexerLossAutoScaler`` does the same without knowing what the loss was divided by.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.rows = rows
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grad_output, gradient_of_loss(loss, ctx.rows), None


def weigh_by_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Turn the mean over a microbatch's tokens into their sum where the schedule expects sums.

    For losses that Megatron's own ``DSAttention.forward`` attaches, which are means over its output's rows.
    """

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        grad_output, grad_loss = original(ctx, grad_output)
        if _sums_over_tokens:
            sequence, batch = grad_output.shape[:2]
            grad_loss = grad_loss * (sequence * batch)
        return grad_output, grad_loss

    return backward
