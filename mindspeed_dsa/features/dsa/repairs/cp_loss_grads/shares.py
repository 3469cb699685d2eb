"""A context parallel rank's share of the gradient of a loss that is a mean over its own rows.

Megatron multiplies the loss by the number of context parallel ranks, because data parallelism averages over
them. That fits sums that were divided by all ranks' rows. The logged loss, an average over ranks, is right.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

_OURS = "mindspeed"
"""Name of our kernel backend, whose losses have the gradient of a share already."""


class _Share(Function):
    """Identity; in backward a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def start_with_share(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``FusedDSAIndexerLoss.backward``."""

    def backward(ctx: Any, grad_topk_indices: Any, grad_loss: Tensor) -> Any:
        if not ctx.calculate_per_token_loss:
            grad_loss = grad_loss / _ranks(ctx.pg_collection)
        return original(ctx, grad_topk_indices, grad_loss)

    return backward


def share_of_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of ``dsa_kernels`` whose last result is the loss, or None."""

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


def _ranks(groups: Any) -> int:
    """Context parallel size."""
    group = getattr(groups, "cp", None)
    return 1 if group is None else int(group.size())
