"""Transfer of experts' weights to other ranks for one forward and backward, and of their gradients back.

The weights of an expert pass along a chain: from their owner to the first receiver, from there to the next.
Gradients come back along the same chain: each rank adds its own to those that it receives, so the order of
the sum is fixed.

Two autograd functions split each transfer into a start and a wait, as in
:mod:`mindspeed_dsa.parallel.all_to_all`. In forward, the weights are in transfer between
:meth:`WeightTransfer.launch` and :meth:`WeightTransfer.wait`. In backward, the node of ``wait`` sends the
gradients, and the node of :meth:`WeightTransfer.announce` waits for them. Nodes created between ``announce``
and ``wait`` hide this transfer.

The node of ``announce`` has all weights that could be sent as inputs. Autograd therefore completes a weight's
gradient, and runs its hooks, only after the gradients of the receivers have arrived. If a schedule computes
weight gradients later (``--split-backward``), this node is not used: the gradients of the receivers are
queued beside the weight's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.features.moe.balanced_experts.chains import Chains, Flow, Lane
from mindspeed_dsa.features.moe.experts import WeightSlice
from mindspeed_dsa.parallel.weight_gradients import QueuedGradient, queued_gradient_of


@dataclass(frozen=True)
class MovedExpert:
    """Expert whose weights are sent. All ranks of the group build the same list.

    Attributes:
        slot: position among the experts of all ranks; column of the routing map.
        number: number of the expert in the layer, for names of messages.
        owner: rank in the group to which the expert belongs.
        chain: ranks in the group that receive the weights, in this order; excludes the owner.
        learns: whether the expert is trained; only then gradients are sent back.
        weights: the expert's weights on the owner; empty on other ranks.
    """

    slot: int
    number: int
    owner: int
    chain: tuple[int, ...]
    learns: bool
    weights: tuple[WeightSlice, ...] = ()


class WeightTransfer:
    """Weights and gradients of the experts moved in one forward.

    Args:
        experts: moved experts, identical on all ranks except for ``weights``.
        parameters: all parameters that this rank could send in any forward, at least one.
        shapes: shapes of one expert's weights.
        group: process group.
        lane: lane of the group's transfers.
    """

    def __init__(
        self,
        experts: Sequence[MovedExpert],
        parameters: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        group: Any,
        lane: Lane,
    ) -> None:
        self.experts, self._parameters, self._shapes = experts, parameters, shapes
        self._group, self._lane = group, lane
        self._like = parameters[0]
        self.rank = dist.get_rank(group)
        self.received = [expert for expert in experts if self.rank in expert.chain]
        self.token: Tensor | None = None
        self._queued: dict[int, QueuedGradient] = {}
        self._weights: Chains | None = None
        self._gradients: Chains | None = None
        self._buffers: list[Tensor] = []
        self._returned: list[tuple[WeightSlice, Tensor]] = []

    def announce(self) -> None:
        """Create the node that waits for the gradients in backward. All ranks call this at the same point."""
        self.token = _Announce.apply(self, self._anchor(), *self._parameters)

    def _anchor(self) -> Tensor:
        # A rank with frozen experts may still receive trained ones.
        learns = any(expert.learns for expert in self.experts)
        return torch.empty((), device=self._like.device, requires_grad=learns)

    def wait(self, rows: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Wait for the received weights. The backward of this node sends their gradients.

        Args:
            rows: input of the received experts, possibly with 0 rows. It connects this node to the graph on
                every rank.

        Returns:
            ``rows``, and a list of weights per received expert, in the order of ``received``.
        """
        token, self.token = self.token, None
        queued = ((parameter, queued_gradient_of(parameter)) for parameter in self._parameters)
        self._queued = {id(parameter): gradient for parameter, gradient in queued if gradient is not None}
        if self._queued:
            # Backward gives these weights no gradients. Others, such as biases, still get theirs there.
            others = [
                weight
                for weight in self._parameters
                if weight.requires_grad and id(weight) not in self._queued
            ]
            token = _Announce.apply(self, self._anchor(), *others) if others else self._anchor()
        rows, *weights = _Wait.apply(self, rows, token, len(self.received) * len(self._shapes))
        size = len(self._shapes)
        return rows, [weights[start : start + size] for start in range(0, len(weights), size)]

    def launch(self) -> None:
        """Start sending the weights; later calls do nothing. All ranks call this at the same point."""
        if self._weights is not None:
            return
        flows = []
        for expert in self.experts:
            flow = self._flow("weights", expert, (expert.owner, *expert.chain), self._like.dtype)
            if self.rank == expert.owner:
                flow.own = [weight.of(weight.parameter.detach()) for weight in expert.weights]
            elif self.rank in expert.chain:
                flow.received = self._new_buffers(self._like.dtype)
                self._buffers += flow.received
            flows.append(flow)
        self._weights = Chains(flows, self._group, self._lane)
        self._weights.launch()

    def arrived(self) -> list[Tensor]:
        """Wait for the weights and return their buffers."""
        assert self._weights is not None
        self._weights.arrive()
        buffers, self._buffers = self._buffers, []
        return buffers

    def settle(self) -> None:
        """Wait until this rank has passed the weights on. The parameters may change afterwards."""
        if self._weights is not None:
            self._weights.settle()

    def send_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Start sending gradients of received weights towards the owners, in fp32 or wider.

        Args:
            gradients: gradients of the received weights, in the order of experts and weights.
        """
        rest = iter(gradients)
        wide = torch.promote_types(self._like.dtype, torch.float32)
        flows = []
        for expert in self.experts:
            computed = [next(rest) for _ in self._shapes] if self.rank in expert.chain else []
            if not expert.learns:
                continue
            flow = self._flow("gradients", expert, (*expert.chain[::-1], expert.owner), wide)
            flow.own = [gradient.to(wide).contiguous() for gradient in computed]
            if self.rank == expert.owner:
                flow.received = self._new_buffers(wide)
                self._returned += zip(expert.weights, flow.received, strict=True)
            elif self.rank in expert.chain[:-1]:
                flow.received = self._new_buffers(wide)
            flows.append(flow)
        self._gradients = Chains(flows, self._group, self._lane)
        self._gradients.launch()
        self._queue_gradients()

    def _flow(self, what: str, expert: MovedExpert, ranks: tuple[int, ...], dtype: torch.dtype) -> Flow:
        members = dist.get_process_group_ranks(self._group)
        path = " > ".join(str(members[rank]) for rank in ranks)
        sizes = [shape.numel() for shape in self._shapes]
        return Flow(ranks, f"{what} of expert {expert.number} along ranks {path}", sizes, dtype.itemsize)

    def _new_buffers(self, dtype: torch.dtype) -> list[Tensor]:
        return [self._like.new_empty(shape, dtype=dtype) for shape in self._shapes]

    def _queue_gradients(self) -> None:
        """Queue the gradients that the other ranks return, beside the weights' own, if those are queued."""
        returned = {id(weight.parameter): weight.parameter for weight, _ in self._returned}
        queued = [parameter for key, parameter in returned.items() if key in self._queued]
        for parameter in queued:
            self._queued[id(parameter)].defer(partial(self.gradient_of, parameter))
        if not queued and self._queued and self.experts:
            # This rank only passes gradients on, and still has to wait until they are sent.
            next(iter(self._queued.values())).defer(self.collect)

    def collect(self) -> None:
        """Wait until this rank has its weights' gradients and has passed the others on."""
        self.settle()
        if self._gradients is not None:
            self._gradients.settle()

    def returns_to(self, parameter: Tensor) -> bool:
        """Return whether other ranks return a gradient of this parameter that was not taken yet."""
        return any(weight.parameter is parameter for weight, _ in self._returned)

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Wait for a parameter's gradient from the other ranks, and add it to ``main_grad`` or return it.

        Args:
            parameter: one of this rank's parameters.

        Returns:
            Gradient with the parameter's shape and dtype. ``None``: there is none, or ``main_grad`` has it.
        """
        self.collect()
        returned = [pair for pair in self._returned if pair[0].parameter is parameter]
        if not returned:
            return None
        self._returned = [pair for pair in self._returned if pair[0].parameter is not parameter]
        main_grad: Tensor | None = getattr(parameter, "main_grad", None)
        total = torch.zeros_like(parameter) if main_grad is None else main_grad
        for weight, gradient in returned:
            weight.of(total).add_(gradient)  # main_grad may be wider than the weight
        return total if main_grad is None else None


class _Announce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: WeightTransfer, anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.transfer, ctx.parameters = transfer, parameters
        return anchor.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        transfer, parameters, ctx.parameters = ctx.transfer, ctx.parameters, ()
        transfer.collect()
        return None, None, *(_gradient_of(transfer, parameter) for parameter in parameters)


def _gradient_of(transfer: WeightTransfer, parameter: Tensor) -> Tensor | None:
    is_returned = transfer.returns_to(parameter)
    gradient = transfer.gradient_of(parameter)
    if gradient is None and is_returned:
        # main_grad has it. A parameter's hooks may run on another stream, as Megatron's do from 0.16 on, and
        # autograd lets that stream wait for gradients that a node returns only.
        return parameter.new_zeros(()).expand_as(parameter)
    return gradient


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
