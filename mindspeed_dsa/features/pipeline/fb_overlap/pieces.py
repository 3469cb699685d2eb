"""Parts of one layer's forward and backward, between which its all-to-alls are on their way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.megatron.shared_expert import before_second_half
from mindspeed_dsa.megatron.split_layers import Pass, Passes
from mindspeed_dsa.parallel.all_to_all import InFlight


def until_dispatch(plan: Any) -> list[Any]:
    """Return the nodes before the dispatch: two in megatron-core 0.14 and 0.15, another name from 0.19."""
    names = ("attn", "pre_dispatch_computation", "post_attn")
    return [getattr(plan, name) for name in names if hasattr(plan, name)]


def precision_of(plan: Any) -> AbstractContextManager[Any]:
    """Return the context that a plan's layer computes in; fp8's alone, and called so, before 0.19.2."""
    make: Any = getattr(plan, "get_low_precision_context", None)
    context: AbstractContextManager[Any] = make() if make else plan.get_fp8_context()
    return context


@dataclass
class Handover:
    """Values that one forward hands from piece to piece. Refers to no graph but that of a norm's output.

    Attributes:
        dispatch, combine: rows that are between two pieces.
        combined: of a forward that is run again up to the experts' output, the combine that it had.
        shared: takes the place of the shared expert's output, where that has no graph.
        norm: Megatron's checkpoint of the output of the norm before the experts, where that is recomputed.
        routing_map: between router and permutation, where that is a node of its own.
    """

    dispatch: list[InFlight] = field(default_factory=list)
    combine: list[InFlight] = field(default_factory=list)
    combined: list[InFlight] = field(default_factory=list)
    shared: WithoutGraph | None = None
    norm: Any = None
    routing_map: Tensor | None = None

    def discard_norm(self, first: Tensor) -> None:
        """Free the norm's output, once every piece has read it, until the gradient of ``first`` is there.

        Args:
            first: of all that is computed from the norm's output, it has its gradient first.
        """
        norm, self.norm = self.norm, None
        if norm is not None:
            norm.discard_output_and_register_recompute(first)


class Pieces:
    """A layer's nodes.

    Args:
        plan: Megatron's, with its nodes.
        layer: Megatron's transformer layer.
        shared: of the shared expert, if the layer has one.
        handover: of this forward.
        permutation: node between router and dispatch, if that is one of its own.
        choose_stream: gets the input of a forward, and chooses where rows are moved.
    """

    def __init__(
        self,
        plan: Any,
        layer: Any,
        shared: Shared | None,
        handover: Handover,
        permutation: Any = None,
        choose_stream: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.before, self.experts, self.after = until_dispatch(plan), plan.mlp, plan.moe_combine
        self._permutes = permutation is not None
        self.before += [permutation] if self._permutes else []
        self._choose_stream = choose_stream
        self.prediction, self.shared, self.handover = plan.mtp_post_process, shared, handover
        self._layer, self._state = layer, plan.chunk_state
        self._passes = Pass()

    @property
    def router(self) -> Any:
        """Return the last node that computes something before the dispatch."""
        return self.before[-2 if self._permutes else -1]

    def forward_before(self, hidden: Tensor, followed: bool = True) -> Tensor:
        """Run attention, router and permutation; the dispatch is on its way.

        Args:
            hidden: ``[sequence, batch, hidden]``.
            followed: by features that work in a layer's forward.
        """
        if followed:
            others = [value for name, value in vars(self._state).items() if name != "model"]
            self._passes = Passes(self._layer, hidden, others)
        if self._choose_stream is not None:
            self._choose_stream(hidden)
            self._choose_stream = None  # it knows the nodes, which a recomputed layer lets go
        with self._passes.piece():
            for node in self.before:
                hidden = node.forward(hidden)
        return hidden

    def forward_experts(self, edge: Tensor) -> Any:
        """Run the experts between the shared expert's two halves; the combine is on its way."""
        with self._passes.piece():
            if self.shared is None:
                return self.experts.forward(edge)
            return self.shared.forward(lambda: self.experts.forward(edge))

    def forward_after(self, edges: Any) -> Tensor:
        """Run what follows the combine, to the layer's output, ``[sequence, batch, hidden]``."""
        with self._passes.piece():
            output: Tensor = self.prediction.forward(self.after.forward(edges))
        self._passes.ends(output)
        self._passes = Pass()
        return output

    def backward_after(self, gradient: Tensor) -> Any:
        """Run backward up to the combine; its reverse is on its way."""
        return self.after.backward(self.prediction.backward(gradient))

    def recompute_before(self) -> None:
        """Do what :class:`Recomputed` does; here everything is kept."""

    def recompute_experts(self) -> None:
        """Do what :class:`Recomputed` does; here everything is kept."""

    def backward_experts(self, edges: Any) -> Tensor:
        """Run backward of shared expert and experts; weight gradients run above the dispatch's reverse."""
        if self.shared is not None:
            edges = self.shared.backward(edges)
        received: Tensor = self.experts.backward(edges)
        return received

    def backward_before(self, gradient: Tensor) -> Tensor:
        """Run backward of the rest, to the gradient of the layer's input."""
        for node in reversed(self.before):
            gradient = node.backward(gradient)
        return gradient


class Shared:
    """The shared expert's node, between the router's and the one after the combine.

    Megatron-core 0.14 and 0.15 hand its output on beside the experts'; later releases have it in the layer's
    state, where its input takes its place until then.

    Args:
        node: runs it.
        moe: Megatron's ``MoELayer``.
        state: of the layer.
        handover: of this forward.
    """

    def __init__(self, node: Any, moe: Any, state: Any, handover: Handover) -> None:
        self._node, self._moe, self._state, self._handover = node, moe, state, handover
        self._in: Any = None
        self._out: Any = None

    def forward(self, experts: Callable[[], Tensor]) -> Any:
        """Run it, with ``experts`` in its middle; what it returns is for the node after the combine."""
        done: list[Tensor] = []

        def between(*_: Any) -> None:
            if not done:
                done.append(experts())

        beside = not hasattr(self._state, "shared_expert_output")
        self._in = self._state.pre_mlp_layernorm_output if beside else self._state.shared_expert_output
        with before_second_half(self._moe, between):
            output = self._node.forward(self._in)
        between()
        self._handover.discard_norm(output)
        self._out = output.detach().requires_grad_(output.requires_grad)
        if beside:
            return done[0], self._out
        self._state.shared_expert_output = self._out
        return done[0]

    def backward(self, edges: Any) -> Tensor:
        """Run its backward; the gradient of its input is for the router's node.

        Args:
            edges: from the node after the combine, the gradient of the output perhaps beside the other.
        """
        edge, gradient = edges if isinstance(edges, tuple) else (edges, self._out.grad)
        self._in.grad = self._node.backward(gradient)
        self._in = self._out = None
        result: Tensor = edge
        return result


# -- values without a graph ---------------------------------------------------------------------------


class WithoutGraph:
    """Value that has no graph of its own, but a gradient; what computes it is run again later.

    A leaf would hold the value until then.

    Args:
        value: of any shape.

    Attributes:
        edge: ``[0]``, stands for the value beyond a cut of the graph.
        gradient: of the value, once backward has been there.
    """

    def __init__(self, value: Tensor) -> None:
        self._value: Tensor | None = value
        self.edge = value.new_empty(0).requires_grad_()
        self.gradient: Tensor | None = None

    def enter(self, edge: Tensor) -> Tensor:
        """Return the value, once; it depends on ``edge``, :attr:`edge` or a leaf that stands for it."""
        value, self._value = self._value, None
        entered: Tensor = _Enter.apply(edge, value, self)
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, value: Tensor, entry: WithoutGraph) -> Tensor:
        ctx.entry = entry
        return value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.entry.gradient = gradient
        return gradient.new_empty(0), None, None
