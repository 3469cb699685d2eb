"""Connects the indexer loss to the backward pass and to the log, on any Megatron.

Its scale and its log are kept in Megatron's own classes, which Megatron's DSA reads; releases without DSA get
objects with the same attributes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa.loss_tracker import LossTracker
from mindspeed_dsa.patches import versions

WITHOUT_DSA, TAKES_SUMS = "<0.16", ">=0.19"
"""Releases of Megatron-core without DSA, and those whose scale is for sums with per-token loss."""


def coefficient(config: Any) -> float:
    """``dsa_indexer_loss_coeff``; None and negative values mean no loss."""
    return max(config.dsa_indexer_loss_coeff or 0.0, 0.0)


class LossScale:
    """The state of Megatron's ``DSAIndexerLossAutoScaler``, for releases that lack it."""

    def __init__(self) -> None:
        self.main_loss_backward_scale: Tensor | None = None

    def set_loss_scale(self, scale: Tensor) -> None:
        """Factor of the gradient; the schedules set it before each microbatch's backward."""
        self.main_loss_backward_scale = scale.detach().clone()


class IndexerLoss:
    """Scale and log of one Megatron's indexer loss; see :func:`indexer_loss`.

    Attributes:
        megatron: the Megatron that they belong to.
        sums_over_tokens: whether gradients are sums over tokens, to be divided by their number when the step
            is complete; set in every forward step, read in backward.
    """

    def __init__(self, megatron: Megatron) -> None:
        self.megatron = megatron
        self.sums_over_tokens = False
        release, old = versions.of_megatron(megatron.root), SpecifierSet(WITHOUT_DSA, prereleases=True)
        self._lacks_dsa = release is not None and old.contains(release)
        new = SpecifierSet(TAKES_SUMS, prereleases=True)
        self._takes_sums = release is not None and new.contains(release)
        self._scale, self._tracker = LossScale(), LossTracker(megatron)

    @property
    def scale(self) -> Any:
        """``DSAIndexerLossAutoScaler``: has ``set_loss_scale`` and ``main_loss_backward_scale``."""
        return self._scale if self._lacks_dsa else self._dsa().DSAIndexerLossAutoScaler

    @property
    def tracker(self) -> Any:
        """``DSAIndexerLossLoggingHelper``; see :class:`LossTracker`."""
        return self._tracker if self._lacks_dsa else self._dsa().DSAIndexerLossLoggingHelper

    def _dsa(self) -> Any:
        return self.megatron("core.transformer.experimental_attention_variant.dsa")

    def takes_sums(self, config: Any) -> bool:
        """Whether the schedule's scale is for a loss that is a sum over rows."""
        return self._takes_sums and bool(config.calculate_per_token_loss)

    def gradient(self, loss: Tensor, rows: int) -> Tensor:
        """The gradient that an indexer loss starts its backward pass with.

        Args:
            loss: scalar, a rank's sum over its rows divided by ``rows``.
            rows: of the whole microbatch, over all context parallel ranks.

        Returns:
            Scalar: the scale that was set for Megatron's own losses, times ``rows`` where the schedule
            expects sums.
        """
        scale = self.scale.main_loss_backward_scale
        gradient = torch.ones_like(loss)
        if scale is not None:
            gradient = gradient * scale.to(loss.device)
        return gradient * rows if self.sums_over_tokens else gradient

    def attach(self, output: Tensor, loss: Tensor, rows: int) -> Tensor:
        """``output``, through whose backward the loss gets its gradient; arguments as of :meth:`gradient`."""
        return _AttachedLoss.apply(output, loss, rows, self)  # type: ignore[no-any-return]

    def log(self, loss: Tensor, layer: Any, group: ProcessGroup | None) -> None:
        """Add to the layer's logged loss.

        Args:
            loss: scalar, this rank's share.
            layer: a ``DSAttention``, Megatron's or ours; ``layer_number`` and ``config`` are read.
            group: ranks whose shares add up, or None.
        """
        self.tracker.save_loss_to_tracker(
            loss=loss,
            layer_number=layer.layer_number,
            num_layers=layer.config.num_layers,
            reduce_group=group,
        )


@cache
def indexer_loss(megatron: Megatron) -> IndexerLoss:
    """Scale and log of this Megatron, which has one of each."""
    return IndexerLoss(megatron)


class _AttachedLoss(torch.autograd.Function):
    """Identity on the output; in backward the indexer loss gets its gradient.

    Megatron's ``DSAIndexerLossAutoScaler`` does the same without the divisor of the loss.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, rows: int, of: IndexerLoss) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.rows, ctx.of = rows, of
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (loss,) = ctx.saved_tensors
        return grad_output, ctx.of.gradient(loss, ctx.rows), None, None
