"""Indexer outputs that a layer hands to the layers that share its selection, and their gradients' way back.

With ``--dsa-indexer-loss-layers served``, a layer that shares a selection has an indexer loss as well: the
divergence of its attention from the distribution of the layer's indexer that selected. The gradient of that
loss belongs to outputs of another layer, which may be recomputed in between, or run its backward in another
call of autograd. It is therefore summed here, and the selecting layer adds the sum in its own backward, which
always comes after the backward of the layers above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.precision import wide


class ServedGradients:
    """Gradients of one selecting layer's indexer outputs, summed over the losses of the layers that share.

    One object belongs to one forward of the layer, and to the recomputations of that forward.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, ...]] = {}

    def add(self, run: int, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of one layer's loss.

        Args:
            run: number of the run of tokens, 0 where all tokens are one run.
            gradients: gradient of each output, in the order of :attr:`ServedIndex.outputs`.
        """
        sums = self._sums.get(run)
        if sums is None:
            # A copy, which later calls add to. At least fp32, because several bf16 gradients are summed.
            self._sums[run] = tuple(one.to(wide(one.dtype), copy=True) for one in gradients)
        else:
            for total, one in zip(sums, gradients, strict=True):
                total += one

    def take(self, run: int) -> tuple[Tensor, ...] | None:
        """Return the sums of a run and drop them; None if no layer has added a gradient."""
        return self._sums.pop(run, None)


class Delivery(NamedTuple):
    """Gradients of one layer's loss, which its backward adds to the sums.

    A delivery holds no outputs of the indexer, so these are freed with the last layer that reads them.
    """

    sums: ServedGradients
    """Sums to add to."""
    run: int
    """Number of the run of tokens."""
    gradients: tuple[Tensor, ...]
    """Gradient of each output, for a gradient of the loss of 1."""


@dataclass(frozen=True)
class ServedIndex:
    """Indexer outputs that losses of other layers read.

    Attributes:
        outputs: detached outputs. For losses over the selected keys: their scores ``[batch, rows, topk]``.
            For losses over all visible keys: query, key and weights of the indexer.
        gradients: sums of the gradients of ``outputs``.
        run: number of the run of tokens.
        use_relu: whether the indexer applies ReLU to the per-head products.
    """

    outputs: tuple[Tensor, ...]
    gradients: ServedGradients
    run: int = 0
    use_relu: bool = True

    def delivery(self, gradients: Sequence[Tensor]) -> Delivery:
        """Return what one layer's loss adds in backward: its gradients with respect to ``outputs``."""
        return Delivery(self.gradients, self.run, tuple(gradients))

    def scores_behind(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return query and scores for a loss that the attention's backward computes.

        The backward of the query waits until the gradient of the scores has been delivered. So the gradient
        arrives before the selecting layer's backward, in whatever order autograd runs other nodes.
        """
        (scores,) = self.outputs
        leaf = scores.detach().requires_grad_()
        return _Deliver.apply(self.gradients, self.run, query, leaf)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Serving:
    """Settings by which a layer hands on outputs of its indexer for the losses of other layers.

    Attributes:
        gradients: sums that the other layers add to.
        scores: whether these losses are over the selected keys, and read their scores. Otherwise they are
            over all visible keys, and read query, key and weights of the indexer.
        run: number of the run of tokens.
    """

    gradients: ServedGradients
    scores: bool
    run: int = 0

    def hand_on(self, *outputs: Tensor, use_relu: bool) -> tuple[ServedIndex, tuple[Tensor, ...]]:
        """Return outputs of the indexer twice: for the other layers, and for the layer's own loss.

        Args:
            *outputs: see :class:`ServedIndex`.
            use_relu: see :class:`ServedIndex`.

        Returns:
            Outputs for the layers above, and outputs whose backward adds the gradients of these layers.
        """
        detached = tuple(one.detach() for one in outputs)
        served = ServedIndex(detached, self.gradients, self.run, use_relu)
        if not any(one.requires_grad for one in outputs):
            return served, outputs
        return served, _WithSums.apply(self.gradients, self.run, *outputs)


class _WithSums(torch.autograd.Function):
    """Identity on indexer outputs, whose backward adds the sums of :class:`ServedGradients`."""

    @staticmethod
    def forward(ctx: Any, gradients: ServedGradients, run: int, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.run = gradients, run
        return tuple(one.view_as(one) for one in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *own: Tensor) -> tuple[Any, ...]:
        sums = ctx.gradients.take(ctx.run)
        if sums is None:
            return None, None, *own
        return None, None, *((total + one).to(one.dtype) for total, one in zip(sums, own, strict=True))


class _Deliver(torch.autograd.Function):
    """Identity on query and scores, whose backward delivers the gradient of the scores."""

    @staticmethod
    def forward(
        ctx: Any, gradients: ServedGradients, run: int, query: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.gradients, ctx.run = gradients, run
        return query.view_as(query), scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_query: Tensor, of_scores: Tensor) -> tuple[None, None, Tensor, None]:
        ctx.gradients.add(ctx.run, (of_scores,))
        return None, None, of_query, None
