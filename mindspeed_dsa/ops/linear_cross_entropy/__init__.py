"""Linear cross entropy: the loss of a vocabulary projection, without materializing the logits.

README.md in this folder has the mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.backend import ShapeClass, choose, count_call, spent, unless_empty
from mindspeed_dsa.ops.checks import check_float, check_shape, require
from mindspeed_dsa.ops.linear_cross_entropy.backends import (
    Accumulator,
    Chunked,
    LinearCrossEntropy,
    LossCall,
    raised,
)
from mindspeed_dsa.ops.precision import outside_autocast, wide
from mindspeed_dsa.platforms.host_pool import download

OPERATOR = "linear_cross_entropy"

GradientTime = Literal["forward", "backward"]
"""Pass in which the gradient of the weight is computed."""


class TokenLosses(NamedTuple):
    """Loss of each token, and its largest logit with index."""

    loss: Tensor
    """``[tokens]`` fp32 (fp64 for fp64), differentiable."""
    top: Tensor
    """``[tokens]``, largest of this rank's logits, in the dtype of the loss."""
    top_index: Tensor
    """``[tokens]`` int64, row of the weight for ``top``; meaningless unless ``wants_top``."""


@outside_autocast
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    token_weights: Tensor | None = None,
    logit_scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
    first: int | None = None,
    gradient: GradientTime = "forward",
    accumulator: Accumulator | None = None,
    wants_top: bool = False,
    rows: int = 0,
    backend: str = "auto",
) -> TokenLosses:
    """Return the cross entropy of ``logit_scale * hidden @ weight.T`` for each token.

    The gradient of ``hidden`` covers this rank's vocabulary only; the caller all-reduces it over ``group``.

    Args:
        hidden: ``[tokens, hidden]``; fp32, bf16, fp16 or fp64.
        weight: ``[vocabulary, hidden]`` in the same dtype, this rank's entries of the vocabulary.
        labels: ``[tokens]`` int64, entries of the whole vocabulary. A label outside it counts as the largest
            logit, as in Megatron.
        token_weights: ``[tokens]``, expected per-token loss gradient, up to a common factor: Megatron's loss
            mask. Ones by default. A wrong guess costs time, not accuracy.
        logit_scale: factor of the logits.
        group: group of the ranks that hold the vocabulary in equal parts.
        first: first entry of this rank's part; by default, parts are in the order of the ranks.
        gradient: pass that computes the weight gradient. ``"forward"`` keeps it in fp32 until backward;
            ``"backward"`` keeps no such tensor and computes the logits twice.
        accumulator: receiver of the weight gradient in place of autograd, or None.
        wants_top: whether the index of each token's largest logit is needed.
        rows: tokens per chunk; 0 selects a number that is efficient on the device.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        The losses, and the largest logit of each token.

    Raises:
        ValueError: a shape, dtype or option does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    check_shape(OPERATOR, "hidden", hidden, (None, None), "[tokens, hidden]")
    tokens, width = hidden.shape
    check_shape(OPERATOR, "weight", weight, (None, width), f"[vocabulary, {width}]")
    check_shape(OPERATOR, "labels", labels, (tokens,), f"[{tokens}]")
    check_float(OPERATOR, hidden=hidden, weight=weight)
    require(weight.shape[0] > 0, OPERATOR, "the vocabulary is empty")
    require(labels.dtype == torch.int64, OPERATOR, f"labels must be int64, got {labels.dtype}")
    require(
        gradient in get_args(GradientTime),
        OPERATOR,
        f"gradient must be one of {', '.join(get_args(GradientTime))}, got {gradient!r}",
    )
    dtype = wide(hidden.dtype)
    if token_weights is None:
        token_weights = torch.ones(tokens, dtype=dtype, device=hidden.device)
    check_shape(OPERATOR, "token_weights", token_weights, (tokens,), f"[{tokens}]")
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    if first is None:
        first = 0 if group is None else dist.get_rank(group) * weight.shape[0]
    shape = ShapeClass.of(hidden, ("hidden", width), ("vocabulary", weight.shape[0]))
    implementation: LinearCrossEntropy = unless_empty(OPERATOR, choose(OPERATOR, backend, shape), hidden)
    count_call(OPERATOR, implementation)
    weights, scale = token_weights.detach().to(dtype), float(logit_scale)
    call = LossCall(hidden, weight, labels, weights, scale, group, first, rows, wants_top)
    if implementation.KIND == "autograd":
        losses = implementation.losses(call)
        return TokenLosses(losses.loss, losses.top, losses.top_index)
    in_forward, learns = gradient == "forward", torch.is_grad_enabled()
    return TokenLosses(*_Loss.apply(implementation, hidden, weight, call, learns, in_forward, accumulator))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        implementation: Chunked,
        hidden: Tensor,
        weight: Tensor,
        call: LossCall,
        learns: bool,
        in_forward: bool,
        accumulator: Accumulator | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.implementation, ctx.accumulator = implementation, accumulator
        grad_hidden = grad_weight = None
        in_forward = in_forward and learns
        if in_forward and ctx.needs_input_grad[1]:
            grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)  # [tokens, hidden]
        if in_forward and ctx.needs_input_grad[2]:
            grad_weight = torch.zeros_like(
                weight, dtype=wide(weight.dtype), memory_format=torch.contiguous_format
            )
        with spent(OPERATOR, hidden.device):
            losses = implementation.losses_and_gradients(call, grad_hidden, grad_weight)
        if learns:
            call.keep(ctx, grad_hidden, losses.largest, losses.log_sum)
        # Not saved as a tensor: it is neither an input nor an output, and too large to scale out of place.
        ctx.grad_weight = grad_weight
        ctx.mark_non_differentiable(losses.top, losses.top_index)
        return losses.loss, losses.top, losses.top_index

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *unused: Any) -> tuple[Any, ...]:
        call: LossCall
        call, grad_hidden, *sums = LossCall.kept(ctx)
        wants_hidden, wants_weight = ctx.needs_input_grad[1:3]
        implementation: Chunked = ctx.implementation
        with spent(OPERATOR, call.hidden.device):
            factors = grad_loss * call.logit_scale
            formed, ctx.grad_weight = ctx.grad_weight, None
            if wants_hidden and grad_hidden is not None:
                scaled = grad_hidden * (factors / raised(call.hidden.dtype))[:, None]
                grad_hidden = scaled.to(call.hidden.dtype)
                wants_hidden = False
            if not (wants_hidden or wants_weight):
                return None, grad_hidden, None, None, None, None, None
            if formed is not None:
                _finish(implementation, call, sums, factors, formed)
                grad_weight = _deliver(formed, call.weight, ctx.accumulator)
                return None, grad_hidden, grad_weight, None, None, None, None
            # The gradients are computed here: by choice, or again in a second backward of the same graph.
            again = torch.empty_like(call.hidden) if wants_hidden else None
            target, sink = None, ctx.accumulator
            if wants_weight:
                target = None if sink is None else sink.target()
                if target is None or target.dtype != wide(call.weight.dtype):
                    target, sink = torch.zeros_like(call.weight, dtype=wide(call.weight.dtype)), None
            implementation.add_gradients(call, sums, factors, again, target)
            grad_hidden = again if wants_hidden else grad_hidden
            if target is None:
                return None, grad_hidden, None, None, None, None, None
            grad_weight = sink.result() if sink else _deliver(target, call.weight, ctx.accumulator)
            return None, grad_hidden, grad_weight, None, None, None, None


def _finish(
    implementation: Chunked, call: LossCall, sums: Sequence[Tensor], factors: Tensor, formed: Tensor
) -> None:
    """Rescale the weight gradient ``formed`` from ``token_weights`` to the actual ``factors``, in place.

    The forward computed the gradient for ``token_weights``. Usually ``factors`` is a multiple of
    ``token_weights``, and scaling suffices. For all other tokens, the gradient for the difference is computed
    and added. The host waits for their number while the device scales the gradient.
    """
    weights = call.token_weights
    # nanmedian ignores tokens with weight 0, and is the common factor if most other tokens agree.
    proportions = (factors / weights).masked_fill(weights == 0, torch.nan)  # [tokens]
    common = torch.nan_to_num(proportions.nanmedian(), nan=0.0)
    expected = common * weights
    agrees = (factors - expected).abs() <= 4 * torch.finfo(factors.dtype).eps * expected.abs()
    all_agree = download(agrees.all())
    formed.mul_(common)
    if not all_agree():
        others = (~agrees).nonzero()[:, 0]
        some = replace(call, hidden=call.hidden[others], labels=call.labels[others])
        difference = (factors - expected)[others]
        implementation.add_gradients(some, [total[others] for total in sums], difference, None, formed)


def _deliver(gradient: Tensor, weight: Tensor, accumulator: Accumulator | None) -> Tensor | None:
    """Add the weight gradient to the accumulator, if any; return the gradient that autograd gets."""
    if accumulator is None:
        return gradient.to(weight.dtype)
    accumulator.target().add_(gradient)
    return accumulator.result()
