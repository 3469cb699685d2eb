"""Weights lent to other ranks for one forward and backward, whose gradients return to the lender.

Plain autograd, in halves as in :mod:`mindspeed_dsa.parallel.all_to_all`: what runs between
:meth:`Lending.launch` and :meth:`Lending.wait` in forward hides the weights' transfer, and what was created
between :func:`lend` and the wait hides the gradients' transfer in backward. The first half is a user of all
weights that may be lent, whether they are or not: a weight's own gradient is complete only when those of its
borrowers are in it, and hooks that wait for the gradient wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.parallel.transfers import Pending


@dataclass(frozen=True)
class Place:
    """A weight: a parameter, or one entry of a parameter in which several are stacked."""

    parameter: Tensor
    index: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """The part of ``whole``, a tensor of the parameter's shape, that belongs to this weight."""
        return whole if self.index is None else whole[self.index]


@dataclass(frozen=True)
class Loan:
    """Weights that one rank lends; all ranks of the group know all loans, in one order.

    Attributes:
        lender: its rank in the group.
        borrowers: ranks in the group, ascending, without the lender.
        learns: whether gradients return.
        places: of the weights, at the lender; empty elsewhere.
    """

    lender: int
    borrowers: tuple[int, ...]
    learns: bool
    places: tuple[Place, ...] = ()


class Lending:
    """Loans of one forward; made by :func:`lend`."""

    def __init__(self, loans: Sequence[Loan], shapes: Sequence[torch.Size], like: Tensor, group: Any) -> None:
        self.loans, self._shapes, self._like, self._group = loans, shapes, like, group
        self.rank = dist.get_rank(group)
        self.borrowed = [loan for loan in loans if self.rank in loan.borrowers]
        self.token: Tensor | None = None
        self._weights = _Transfer(group)
        self._gradients = _Transfer(group)
        self._buffers: list[Tensor] = []
        self._returned: dict[int, list[list[Tensor]]] = {}

    def wait(self, rows: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """What this rank borrows, arrived; gradients start on their way back where this stands.

        Args:
            rows: what is to be computed with the weights, also if that is nothing: its gradient reaches
                this node on every rank.

        Returns:
            ``rows``, and for each loan that this rank borrows, in their order, its weights.
        """
        token, self.token = self.token, None
        rows, *weights = _Wait.apply(self, rows, token, len(self.borrowed) * len(self._shapes))
        size = len(self._shapes)
        return rows, [weights[start : start + size] for start in range(0, len(weights), size)]

    def launch(self) -> None:
        """Send the weights; every rank of the group does so at the same point."""
        for loan in self.loans:
            if self.rank == loan.lender:
                for borrower in loan.borrowers:
                    for place in loan.places:
                        self._weights.send(place.of(place.parameter.detach()), borrower)
            elif self.rank in loan.borrowers:
                for shape in self._shapes:
                    buffer = self._weights.receive(shape, self._like, self._like.dtype, loan.lender)
                    self._buffers.append(buffer)
        self._weights.launch()

    def arrived(self) -> list[Tensor]:
        """Wait for the borrowed weights."""
        self._weights.wait()
        buffers, self._buffers = self._buffers, []
        return buffers

    def send_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Launch, in 32 bits at least.

        Args:
            gradients: of the borrowed weights, in the order of loans and weights.
        """
        own = iter(gradients)
        for number, loan in enumerate(self.loans):
            wide = torch.promote_types(self._like.dtype, torch.float32)
            if self.rank in loan.borrowers:
                for gradient in (next(own) for _ in self._shapes):
                    if loan.learns:
                        self._gradients.send(gradient.to(wide), loan.lender)
            elif self.rank == loan.lender and loan.learns:
                self._returned[number] = [
                    [self._gradients.receive(shape, self._like, wide, borrower) for shape in self._shapes]
                    for borrower in loan.borrowers
                ]
        self._gradients.launch()

    def add_gradients(self, add: Callable[[Place, Tensor], None]) -> None:
        """Wait, and add up what borrowers return, in the order of their ranks."""
        self._gradients.wait()
        returned, self._returned = self._returned, {}
        for number, by_borrower in returned.items():
            for place, (total, *others) in zip(
                self.loans[number].places, zip(*by_borrower, strict=True), strict=True
            ):
                for other in others:
                    total.add_(other)
                add(place, total)


class _Transfer:
    """Messages between pairs of ranks; both ends name those of a pair in the same order."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._messages: list[dist.P2POp] = []
        self._pending: Pending | None = None

    def send(self, tensor: Tensor, rank: int) -> None:
        self._add(dist.isend, tensor.contiguous(), rank)

    def receive(self, shape: torch.Size, like: Tensor, dtype: torch.dtype, rank: int) -> Tensor:
        result = like.new_empty(shape, dtype=dtype)
        self._add(dist.irecv, result, rank)
        return result

    def _add(self, operation: Any, tensor: Tensor, rank: int) -> None:
        peer = dist.get_global_rank(self._group, rank)
        self._messages.append(dist.P2POp(operation, tensor, peer, self._group))

    def launch(self) -> None:
        """Receives are posted before sends: with some backends a send ends only when it is received."""
        messages, self._messages = self._messages, []
        if messages:
            messages.sort(key=lambda message: message.op is not dist.irecv)
            tensors = [message.tensor for message in messages]
            self._pending = Pending(tensors[0], dist.batch_isend_irecv(messages), tensors)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


def lend(
    loans: Sequence[Loan],
    parameters: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    group: Any,
) -> Lending:
    """Announce loans: in backward, their gradients are waited for where this stands.

    Every rank of the group does so at the same point, also those without a part in the loans.

    Args:
        loans: the same on all ranks but for the places.
        parameters: everything that this rank may ever lend, at least one.
        shapes: of the weights of one loan.
        group: process group.
    """
    lending = Lending(loans, shapes, parameters[0], group)
    # A rank whose own weights do not learn may borrow some that do.
    learns = any(loan.learns for loan in loans)
    anchor = torch.empty((), device=parameters[0].device, requires_grad=learns)
    lending.token = _Lend.apply(lending, anchor, *parameters)
    return lending


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lending: Lending, anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.lending, ctx.parameters = lending, parameters
        return anchor.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        gradients: dict[int, Tensor] = {}

        def add(place: Place, gradient: Tensor) -> None:
            parameter = place.parameter
            main_grad = getattr(parameter, "main_grad", None)
            if main_grad is None:
                if id(parameter) not in gradients:
                    gradients[id(parameter)] = torch.zeros_like(parameter)
                place.of(gradients[id(parameter)]).add_(gradient)
            else:
                # Where gradients accumulate in more bits than the weights have. The parameter's hooks wait
                # for this node, which then has nothing to hand to them.
                place.of(main_grad).add_(gradient)

        ctx.lending.add_gradients(add)
        parameters, ctx.parameters = ctx.parameters, ()
        return None, None, *(gradients.get(id(parameter)) for parameter in parameters)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lending: Lending, rows: Tensor, token: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.lending = lending
        weights = lending.arrived()
        size = len(weights) // max(1, len(lending.borrowed))
        frozen = [
            weight
            for number, loan in enumerate(lending.borrowed)
            for weight in weights[number * size : (number + 1) * size]
            if not loan.learns
        ]
        ctx.mark_non_differentiable(*frozen)
        return rows.view_as(rows), *weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.lending.send_gradients(gradients)
        # What the token's gradient is does not matter: it calls the other half, which waits.
        return None, grad_rows, grad_rows.new_zeros(()), None
