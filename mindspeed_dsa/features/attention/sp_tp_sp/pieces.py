"""Output projection overlapped with the exchange of heads for tokens, in pieces along the sequence.

A piece is the same token range on every rank, with all heads. Each output element is therefore one sum over
all heads, as in a single matmul, and the weight gradient is one matmul over all tokens. Splitting by heads
instead would require sums in the output's dtype, usually 16 bits.

Forward projects a piece while the next one is in flight. Backward sends a piece's gradient while it computes
the next one, and computes the weight gradient before it waits for the transfers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_dsa.parallel.all_to_all import InFlight
from mindspeed_dsa.parallel.transfers import Pending, bounds
from mindspeed_dsa.parallel.weight_gradients import DeferredGradient, deferred_gradient_of

MOST_PIECES = 4
LEAST_TOKENS = 256
"""Smallest number of tokens per piece. Fewer tokens take a device as much time."""


def project_as_they_arrive(heads: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange heads for tokens, and project each piece of tokens as it arrives.

    Args:
        heads: this rank's heads for all tokens, ``[s, b, heads / t * dim]``; ``s`` is a multiple of ``t``.
        weight: parameter ``[hidden, heads * dim]`` of the same dtype.
        group: process group of the ``t`` ranks, which all must call this.

    Returns:
        Output ``[s / t, b, hidden]`` of the rank's own tokens.
    """
    deferred = deferred_gradient_of(weight)
    source = weight if deferred is None else deferred.edge
    output: Tensor = _Projection.apply(heads, source, deferred, InFlight(None, None, group), group)
    return output


def pieces_of(rows: int, batch: int) -> list[tuple[int, int]]:
    """Split ``rows`` sequence positions, of ``batch`` tokens each, into the ranges to exchange one by one."""
    return bounds(rows, min(MOST_PIECES, rows * batch // LEAST_TOKENS))


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        source: Tensor,
        deferred: DeferredGradient | None,
        flight: InFlight,
        group: ProcessGroup,
    ) -> Tensor:
        weight = source if deferred is None else deferred.weight
        ranks = group.size()
        by_rank = heads.unflatten(0, (ranks, -1))  # [t, s / t, b, heads / t * dim]
        _, count, batch, width = by_rank.shape
        pieces = pieces_of(count, batch)

        def launch(piece: tuple[int, int]) -> Pending:
            return flight.send(by_rank[:, slice(*piece)].flatten(0, 1))

        # Allocated whole: backward multiplies all tokens at once for the weight's gradient.
        rows = heads.new_empty(count, batch, ranks * width)
        output = heads.new_empty(count, batch, weight.size(0))
        following = launch(pieces[0])
        for number, (first, end) in enumerate(pieces):
            # Send the next piece before waiting for this one.
            arriving = following
            if number + 1 < len(pieces):
                following = launch(pieces[number + 1])
            arrived = arriving.wait().unflatten(0, (ranks, -1))  # [t, end - first, b, heads / t * dim]
            # -> [end - first, b, t, heads / t * dim], the order of the weight's columns
            rows[first:end].unflatten(-1, (ranks, width)).copy_(arrived.movedim(0, 2))
            torch.mm(rows[first:end].flatten(0, 1), weight.t(), out=output[first:end].flatten(0, 1))
        ctx.learns = weight.requires_grad
        ctx.save_for_backward(weight, *([rows] if ctx.learns else []))
        ctx.deferred, ctx.flight, ctx.ranks, ctx.pieces = deferred, flight, ranks, pieces
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        weight, *rows = ctx.saved_tensors
        ranks, batch = ctx.ranks, grad_output.size(1)
        flat = grad_output.flatten(0, 1).contiguous()  # [s / t * b, hidden]
        # Send each piece's gradient right after its matmul.
        under_way = []
        for first, end in ctx.pieces if ctx.needs_input_grad[0] else ():
            piece = torch.mm(flat[first * batch : end * batch], weight)
            # [t, end - first, b, heads / t * dim]
            by_rank = piece.view(end - first, batch, ranks, -1).movedim(2, 0)
            under_way.append(ctx.flight.send(by_rank.flatten(0, 1), reverse=True))
        # Computed while the pieces are in flight.
        grad_source = _gradient_of_weight(ctx.deferred, flat, rows[0].flatten(0, 1)) if ctx.learns else None
        parts = [pending.wait().unflatten(0, (ranks, -1)) for pending in under_way]
        if not parts:
            return None, grad_source, None, None, None
        # [t, s / t, b, heads / t * dim]
        grad_heads = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return grad_heads.flatten(0, 1), grad_source, None, None, None


def _gradient_of_weight(deferred: DeferredGradient | None, grad_output: Tensor, rows: Tensor) -> Tensor:
    """Return the weight's gradient, or a placeholder ``[0]`` if its computation is deferred."""

    def gradient() -> Tensor:
        return torch.mm(grad_output.t(), rows)

    if deferred is None:
        return gradient()
    # The closure runs later in backward, and keeps both tensors until then.
    token: Tensor = deferred.defer(gradient, (rows, grad_output))
    return token
