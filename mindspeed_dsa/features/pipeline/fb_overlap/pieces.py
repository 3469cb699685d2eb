"""Pieces of one layer's forward and backward; all-to-alls are in flight between them."""

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
    """Return the plan's nodes that run before the dispatch."""
    # 0.14 and 0.15: attn and post_attn. From 0.19: pre_dispatch_computation instead of attn.
    names = ("attn", "pre_dispatch_computation", "post_attn")
    return [getattr(plan, name) for name in names if hasattr(plan, name)]


def precision_of(plan: Any) -> AbstractContextManager[Any]:
    """Return the fp8/fp4 context manager of a plan's layer; before 0.19.2, fp8 only."""
    make: Any = getattr(plan, "get_low_precision_context", None)
    context: AbstractContextManager[Any] = make() if make else plan.get_fp8_context()
    return context


@dataclass
class Handover:
    """State passed between the pieces of one forward. Holds no graph except for a norm's output.

    Attributes:
        dispatch, combine: transfers in flight between two pieces.
        combined: combine of the first forward, if this forward is a recomputation; it is not sent again.
        shared: placeholder for the shared expert's output, if the output was computed without a graph.
        norm: Megatron's ``CheckpointWithoutOutput`` of the norm before the experts.
        routing_map: routing map for a separate permutation node.
    """

    dispatch: list[InFlight] = field(default_factory=list)
    combine: list[InFlight] = field(default_factory=list)
    combined: list[InFlight] = field(default_factory=list)
    shared: WithoutGraph | None = None
    norm: Any = None
    routing_map: Tensor | None = None

    def discard_norm(self, first: Tensor) -> None:
        """Free the norm's output; recompute it when ``first`` gets its gradient.

        Args:
            first: the tensor, among those computed from the norm's output, whose gradient arrives first.
        """
        norm, self.norm = self.norm, None
        if norm is not None:
            norm.discard_output_and_register_recompute(first)


class Pieces:
    """Three pieces of a layer for one forward and backward: up to the dispatch, experts, after the combine.

    Args:
        plan: Megatron's layer plan with its nodes.
        layer: Megatron's transformer layer.
        shared: the shared expert's node, or ``None``.
        handover: state passed between the pieces of this forward.
        permutation: node of the permutation, between router and dispatch, if it is separate.
        choose_stream: function that selects the permutation's stream, called with the forward's input.
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
        """Last node before the dispatch, without the permutation."""
        return self.before[-2 if self._permutes else -1]

    def forward_before(self, hidden: Tensor, followed: bool = True) -> Tensor:
        """Run attention, router and permutation, and start the dispatch.

        Args:
            hidden: hidden states, ``[sequence, batch, hidden]``.
            followed: whether to call the callbacks that features have registered for the layer's forward.

        Returns:
            Edge of the dispatch ``[0]``, for :meth:`forward_experts`. For a dense layer, the hidden states
            before the MLP.
        """
        if followed:
            others = [value for name, value in vars(self._state).items() if name != "model"]
            self._passes = Passes(self._layer, hidden, others)
        if self._choose_stream is not None:
            self._choose_stream(hidden)
            self._choose_stream = None  # it refers to the nodes, which a recomputed layer must release
        with self._passes.piece():
            for node in self.before:
                hidden = node.forward(hidden)
        return hidden

    def forward_experts(self, edge: Tensor) -> Any:
        """Run the shared expert's fc1, the routed experts, start the combine, and run the shared fc2."""
        with self._passes.piece():
            if self.shared is None:
                return self.experts.forward(edge)
            return self.shared.forward(lambda: self.experts.forward(edge))

    def forward_after(self, edges: Any) -> Tensor:
        """Wait for the combine, run the rest, and return the output ``[sequence, batch, hidden]``."""
        with self._passes.piece():
            output: Tensor = self.prediction.forward(self.after.forward(edges))
        self._passes.ends(output)
        self._passes = Pass()
        return output

    def backward_after(self, gradient: Tensor) -> Any:
        """Run backward down to the combine, and start the reverse combine."""
        return self.after.backward(self.prediction.backward(gradient))

    def recompute_before(self) -> None:
        """Do nothing; :class:`Recomputed` overrides this."""

    def recompute_experts(self) -> None:
        """Do nothing; :class:`Recomputed` overrides this."""

    def backward_experts(self, edges: Any) -> Tensor:
        """Run backward of shared and routed experts. Weight gradients overlap with the reverse dispatch."""
        if self.shared is not None:
            edges = self.shared.backward(edges)
        received: Tensor = self.experts.backward(edges)
        return received

    def backward_before(self, gradient: Tensor) -> Tensor:
        """Run backward down to the layer's input, and return its gradient."""
        for node in reversed(self.before):
            gradient = node.backward(gradient)
        return gradient


class Shared:
    """Shared expert as a separate node, between the router's node and the node after the combine.

    Megatron-core 0.14 and 0.15 return the shared expert's output together with the experts' output. Later
    releases store it in the layer's state, under the name that holds the shared expert's input until then.

    Args:
        node: node that runs the shared expert.
        moe: Megatron's ``MoELayer``.
        state: state of the layer's plan.
        handover: state passed between the pieces of this forward.
    """

    def __init__(self, node: Any, moe: Any, state: Any, handover: Handover) -> None:
        self._node, self._moe, self._state, self._handover = node, moe, state, handover
        self._in: Any = None
        self._out: Any = None

    def forward(self, experts: Callable[[], Tensor]) -> Any:
        """Run the shared expert, and ``experts`` between its fc1 and fc2; return the next node's inputs."""
        done: list[Tensor] = []

        def between(*_: Any) -> None:
            if not done:
                done.append(experts())

        # True in 0.14 and 0.15.
        beside = not hasattr(self._state, "shared_expert_output")
        self._in = self._state.pre_mlp_layernorm_output if beside else self._state.shared_expert_output
        with before_second_half(self._moe, between):
            output = self._node.forward(self._in)
        between()
        self._handover.discard_norm(output)
        # A leaf that collects the output's gradient.
        self._out = output.detach().requires_grad_(output.requires_grad)
        if beside:
            return done[0], self._out
        self._state.shared_expert_output = self._out
        return done[0]

    def backward(self, edges: Any) -> Tensor:
        """Run the shared expert's backward, and store its input gradient for the router's node.

        Args:
            edges: gradient of the experts' edge, from the node after the combine. In 0.14 and 0.15, a tuple
                with the gradient of the shared expert's output.

        Returns:
            Gradient of the experts' edge.
        """
        edge, gradient = edges if isinstance(edges, tuple) else (edges, self._out.grad)
        self._in.grad = self._node.backward(gradient)
        self._in = self._out = None
        result: Tensor = edge
        return result


# -- values without a graph ---------------------------------------------------------------------------


class WithoutGraph:
    """Value computed without a graph, which collects its gradient until its computation is repeated.

    Unlike a leaf tensor, it does not keep the value's memory until then.

    Args:
        value: tensor of any shape.

    Attributes:
        edge: empty tensor that replaces the value where the graph is cut.
        gradient: gradient of the value after backward, or ``None``.
    """

    def __init__(self, value: Tensor) -> None:
        self._value: Tensor | None = value
        self.edge = value.new_empty(0).requires_grad_()
        self.gradient: Tensor | None = None

    def enter(self, edge: Tensor) -> Tensor:
        """Return the value with a graph that starts at ``edge``, or at a leaf that replaces it. Call once."""
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
        # Kept until the second forward; the edge gets an empty gradient.
        ctx.entry.gradient = gradient
        return gradient.new_empty(0), None, None
