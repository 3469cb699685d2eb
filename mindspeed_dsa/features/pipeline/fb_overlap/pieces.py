"""A layer's nodes as the six pieces that a pair runs, and its shared expert as a node of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mindspeed_dsa.megatron.split_layers import Passes
from mindspeed_dsa.parallel.all_to_all import InFlight


@dataclass
class Crossing:
    """What one forward hands from one piece to another. Refers to no graph but that of a norm's output.

    Attributes:
        dispatch, combine: rows that are between two pieces.
        norm: Megatron's checkpoint of the output of the norm before the experts, where that is recomputed.
    """

    dispatch: list[InFlight] = field(default_factory=list)
    combine: list[InFlight] = field(default_factory=list)
    norm: Any = None

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
    """

    def __init__(self, plan: Any, layer: Any, shared: Shared | None) -> None:
        self._before, self._experts, self._after = until_dispatch(plan), plan.mlp, plan.moe_combine
        self._prediction, self._shared = plan.mtp_post_process, shared
        self._layer, self._state = layer, plan.chunk_state
        self._passes: Passes | None = None

    def forward_before(self, hidden: Tensor) -> Tensor:
        """Attention, router and permutation; the dispatch is on its way."""
        others = [value for name, value in vars(self._state).items() if name != "model"]
        self._passes = Passes(self._layer, hidden, others)
        with self._passes.piece():
            for node in self._before:
                hidden = node.forward(hidden)
        return hidden

    def forward_experts(self, edge: Tensor) -> Any:
        """The experts between the shared expert's two halves; the combine is on its way."""
        assert self._passes is not None
        with self._passes.piece():
            if self._shared is None:
                return self._experts.forward(edge)
            return self._shared.forward(lambda: self._experts.forward(edge))

    def forward_after(self, edges: Any) -> Tensor:
        """The layer's output, ``[sequence, batch, hidden]``."""
        passes, self._passes = self._passes, None
        assert passes is not None
        with passes.piece():
            output: Tensor = self._prediction.forward(self._after.forward(edges))
        passes.ends(output)
        return output

    def backward_after(self, gradient: Tensor) -> Any:
        """Up to the combine; its reverse is on its way."""
        return self._after.backward(self._prediction.backward(gradient))

    def backward_experts(self, edges: Any) -> Tensor:
        """Shared expert and experts; the dispatch's reverse was on its way under the weights' gradients."""
        if self._shared is not None:
            edges = self._shared.backward(edges)
        received: Tensor = self._experts.backward(edges)
        return received

    def backward_before(self, gradient: Tensor) -> Tensor:
        """Gradient of the layer's input."""
        for node in reversed(self._before):
            gradient = node.backward(gradient)
        return gradient


class Shared:
    """The shared expert's node, between the router's and the one after the combine.

    Megatron-core 0.14 and 0.15 hand its output on beside the experts'; later releases have it in the layer's
    state, where its input takes its place until then.

    Args:
        node: runs it.
        second_half: the module that begins its second half; ``None`` where it stays in one piece.
        state: of the layer.
        crossing: of this forward.
    """

    def __init__(self, node: Any, second_half: Any, state: Any, crossing: Crossing) -> None:
        self._node, self._second_half, self._state = node, second_half, state
        self._crossing = crossing
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
        if self._second_half is None:
            output = self._node.forward(self._in)
        else:
            hook = self._second_half.register_forward_pre_hook(between)
            try:
                output = self._node.forward(self._in)
            finally:
                hook.remove()
        between()
        self._crossing.discard_norm(output)
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


def until_dispatch(plan: Any) -> list[Any]:
    """The nodes before the dispatch: two in megatron-core 0.14 and 0.15, another name from 0.19."""
    names = ("attn", "pre_dispatch_computation", "post_attn")
    return [getattr(plan, name) for name in names if hasattr(plan, name)]
