"""Transfer of experts' weights to other ranks for one forward and backward, and of their gradients back.

Two autograd functions split each transfer into a start and a wait, as in
:mod:`mindspeed_dsa.parallel.all_to_all`. In forward, the weights are in transfer between
:meth:`WeightTransfer.launch` and :meth:`WeightTransfer.wait`. In backward, the node of ``wait`` sends the
gradients, and the node of :meth:`WeightTransfer.announce` waits for them. Nodes created between ``announce``
and ``wait`` hide this transfer.

The node of ``announce`` has all weights that could be sent as inputs. Autograd therefore completes a weight's
gradient, and runs its hooks, only after the gradients of the receivers have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.features.moe.experts import WeightSlice
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.parallel.transfers import Pending


@dataclass(frozen=True)
class MovedExpert:
    """Expert whose weights are sent. All ranks of the group build the same list.

    Attributes:
        owner: rank in the group to which the expert belongs.
        receivers: ranks in the group that receive the weights, ascending; excludes the owner.
        learns: whether the expert is trained; only then gradients are sent back.
        weights: the expert's weights on the owner; empty on other ranks.
    """

    owner: int
    receivers: tuple[int, ...]
    learns: bool
    weights: tuple[WeightSlice, ...] = ()


class WeightTransfer:
    """Weights and gradients of the experts moved in one forward.

    Args:
        experts: moved experts, identical on all ranks except for ``weights``.
        parameters: all parameters that this rank could send in any forward, at least one.
        shapes: shapes of one expert's weights.
        group: process group.
    """

    def __init__(
        self,
        experts: Sequence[MovedExpert],
        parameters: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        group: Any,
    ) -> None:
        self.experts, self._parameters, self._shapes, self._group = experts, parameters, shapes, group
        self._like = parameters[0]
        self.rank = dist.get_rank(group)
        self.received = [expert for expert in experts if self.rank in expert.receivers]
        self.token: Tensor | None = None
        self._launched = False
        self._weights = _Messages(group)
        self._gradients = _Messages(group)
        self._buffers: list[Tensor] = []
        self._returned: dict[int, list[list[Tensor]]] = {}

    def announce(self) -> None:
        """Create the node that waits for the gradients in backward. All ranks call this at the same point."""
        # A rank with frozen experts may still receive trained ones.
        learns = any(expert.learns for expert in self.experts)
        anchor = torch.empty((), device=self._like.device, requires_grad=learns)
        self.token = _Announce.apply(self, anchor, *self._parameters)

    def wait(self, rows: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Wait for the received weights. The backward of this node sends their gradients.

        Args:
            rows: input of the received experts, possibly with 0 rows. It connects this node to the graph on
                every rank.

        Returns:
            ``rows``, and a list of weights per received expert, in the order of ``received``.
        """
        token, self.token = self.token, None
        rows, *weights = _Wait.apply(self, rows, token, len(self.received) * len(self._shapes))
        size = len(self._shapes)
        return rows, [weights[start : start + size] for start in range(0, len(weights), size)]

    def launch(self) -> None:
        """Start sending the weights; later calls do nothing. All ranks call this at the same point."""
        if self._launched:
            return
        self._launched = True
        for expert in self.experts:
            if self.rank == expert.owner:
                for receiver in expert.receivers:
                    for weight in expert.weights:
                        self._weights.send(weight.of(weight.parameter.detach()), receiver)
            elif self.rank in expert.receivers:
                for shape in self._shapes:
                    buffer = self._weights.receive(shape, self._like, self._like.dtype, expert.owner)
                    self._buffers.append(buffer)
        self._weights.launch()

    def arrived(self) -> list[Tensor]:
        """Wait for the weights and return their buffers."""
        self._weights.wait()
        buffers, self._buffers = self._buffers, []
        return buffers

    def send_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Start sending gradients of received weights to the owners, in fp32 or wider.

        Args:
            gradients: gradients of the received weights, in the order of experts and weights.
        """
        rest = iter(gradients)
        for number, expert in enumerate(self.experts):
            wide = torch.promote_types(self._like.dtype, torch.float32)
            if self.rank in expert.receivers:
                for gradient in (next(rest) for _ in self._shapes):
                    if expert.learns:
                        self._gradients.send(gradient.to(wide), expert.owner)
            elif self.rank == expert.owner and expert.learns:
                self._returned[number] = [
                    [self._gradients.receive(shape, self._like, wide, receiver) for shape in self._shapes]
                    for receiver in expert.receivers
                ]
        self._gradients.launch()

    def add_gradients(self, add: Callable[[WeightSlice, Tensor], None]) -> None:
        """Wait for the gradients; call ``add`` with each weight's sum over the receivers, in rank order."""
        self._gradients.wait()
        returned, self._returned = self._returned, {}
        for number, by_receiver in returned.items():
            for weight, (total, *others) in zip(
                self.experts[number].weights, zip(*by_receiver, strict=True), strict=True
            ):
                for other in others:
                    total.add_(other)
                add(weight, total)


class _Messages:
    """Batch of point-to-point messages. Both ranks of a pair must add theirs in the same order."""

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
        """Start all messages, receives first: some backends complete a send only once it is received."""
        messages, self._messages = self._messages, []
        if messages:
            messages.sort(key=lambda message: message.op is not dist.irecv)
            tensors = [message.tensor for message in messages]
            with named("weights of lent experts"):
                self._pending = Pending(tensors[0], dist.batch_isend_irecv(messages), tensors)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


class _Announce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: WeightTransfer, anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.transfer, ctx.parameters = transfer, parameters
        return anchor.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        gradients: dict[int, Tensor] = {}

        def add(weight: WeightSlice, gradient: Tensor) -> None:
            parameter = weight.parameter
            main_grad = getattr(parameter, "main_grad", None)
            if main_grad is None:
                if id(parameter) not in gradients:
                    gradients[id(parameter)] = torch.zeros_like(parameter)
                weight.of(gradients[id(parameter)]).add_(gradient)
            else:
                # main_grad may be wider than the weight. The parameter's hooks wait for this node, which
                # then returns no gradient for the parameter.
                weight.of(main_grad).add_(gradient)

        ctx.transfer.add_gradients(add)
        parameters, ctx.parameters = ctx.parameters, ()
        return None, None, *(gradients.get(id(parameter)) for parameter in parameters)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, transfer: WeightTransfer, rows: Tensor, token: Tensor, count: int
    ) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        weights = transfer.arrived()
        size = len(weights) // max(1, len(transfer.received))
        frozen = [
            weight
            for number, expert in enumerate(transfer.received)
            for weight in weights[number * size : (number + 1) * size]
            if not expert.learns
        ]
        # Frozen experts send no gradients back, and their owner expects none.
        ctx.mark_non_differentiable(*frozen)
        return rows.view_as(rows), *weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.transfer.send_gradients(gradients)
        # The token's gradient value is unused: it only makes backward reach _Announce, which waits.
        return None, grad_rows, grad_rows.new_zeros(()), None
