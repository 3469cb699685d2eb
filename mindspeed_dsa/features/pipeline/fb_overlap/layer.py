"""One layer as pieces with a backward of their own, and the order in which two layers' pieces run.

Megatron's schedule pairs a layer's forward (F) with the backward (B) of a layer of another microbatch. It has
the layer's steps as nodes, each with a graph of its own, whose all-to-alls block. Here a transfer is started
at the end of a piece and awaited at the beginning of the next one, in forward and in backward, so that
whatever runs in between runs under it::

    B  after the combine                    starts the reversed combine
    F  up to the dispatch                   starts the dispatch
    B  shared expert, inputs of experts     starts the reversed dispatch; then weights of experts
    F  shared expert and experts            starts the combine
    B  up to the dispatch
    F  after the combine

A direction that runs alone, as in warm-up and cool-down, runs its own lines: the shared expert and the
weights' gradients are then all that its transfers have above them. The order is the same on all ranks, which
the transfers of a group need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mindspeed_dsa.integration.parted_transfers import arriving, departing
from mindspeed_dsa.parallel.all_to_all import InFlight
from mindspeed_dsa.parallel.port import opened

_Step = Callable[..., Any]
"""A node's forward: it gets the node and its inputs."""
_postponing: ContextVar[bool] = ContextVar("shared expert postponed", default=False)


@dataclass
class _Crossing:
    """Rows of one forward that are between two pieces. Refers to no graph."""

    dispatch: list[InFlight] = field(default_factory=list)
    combine: list[InFlight] = field(default_factory=list)


class _Pieces:
    """A layer's nodes.

    Args:
        plan: Megatron's, with its nodes.
        shared: of the shared expert, if the layer has one.
    """

    def __init__(self, plan: Any, shared: _Shared | None) -> None:
        self._before, self._experts, self._after = _until_dispatch(plan), plan.mlp, plan.moe_combine
        self._prediction, self._shared = plan.mtp_post_process, shared

    def forward_before(self, hidden: Tensor) -> Tensor:
        """Attention, router and permutation; the dispatch is on its way."""
        for node in self._before:
            hidden = node.forward(hidden)
        return hidden

    def forward_experts(self, edge: Tensor) -> Any:
        """The experts between the shared expert's two halves; the combine is on its way."""
        if self._shared is None:
            return self._experts.forward(edge)
        return self._shared.forward(lambda: self._experts.forward(edge))

    def forward_after(self, edges: Any) -> Tensor:
        """The layer's output, ``[sequence, batch, hidden]``."""
        output: Tensor = self._prediction.forward(self._after.forward(edges))
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


class _Shared:
    """The shared expert's node, between the router's and the one after the combine.

    Megatron-core 0.14 and 0.15 hand its output on beside the experts'; later releases have it in the layer's
    state, where its input takes its place until then.

    Args:
        node: runs it.
        second_half: the module that begins its second half.
        state: of the layer.
    """

    def __init__(self, node: Any, second_half: Any, state: Any) -> None:
        self._node, self._second_half, self._state = node, second_half, state
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
        hook = self._second_half.register_forward_pre_hook(between)
        try:
            output = self._node.forward(self._in)
        finally:
            hook.remove()
        between()
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


def cut_at_transfers(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerLayerSchedulePlan._build_callable_nodes``: everything is queued in one place."""

    def _build_callable_nodes(
        self: Any, event: Any, comp_stream: Any, comm_stream: Any, extra_args: dict[str, Any]
    ) -> None:
        original(self, event, comp_stream, comp_stream, extra_args)
        moe, shared = _transformer_layer(self.layer).mlp, None
        if hasattr(moe, "token_dispatcher"):
            crossing, router = _Crossing(), _until_dispatch(self)[-1]
            router.submodule = _before_experts(router.submodule, self.moe_dispatch.submodule, crossing)
            self.mlp.submodule = _experts(self.mlp.submodule, moe, crossing)
            self.moe_combine.submodule = _after_experts(self.moe_combine.submodule, crossing)
            self.mlp.free_input = self.moe_combine.free_input = False
            self.moe_dispatch = None
            if moe.use_shared_expert:
                node = type(self.mlp)(
                    comp_stream,
                    event,
                    self.layer_state,
                    self.chunk_state,
                    _shared_expert(moe),
                    name="shared_expert",
                    extra_args=extra_args,
                )
                shared = _Shared(node, moe.shared_experts.linear_fc2, self.layer_state)
        elif not hasattr(self, "post_attn"):
            self.mlp.submodule = _normalised_at_end(self.mlp.submodule)
        self.pieces = _Pieces(self, shared)

    return _build_callable_nodes


def _until_dispatch(plan: Any) -> list[Any]:
    """The nodes before the dispatch: two in megatron-core 0.14 and 0.15, another name from 0.19."""
    names = ("attn", "pre_dispatch_computation", "post_attn")
    return [getattr(plan, name) for name in names if hasattr(plan, name)]


def _transformer_layer(layer: Any) -> Any:
    """The layer itself, or the one in a layer of multi-token prediction."""
    for name in ("transformer_layer", "mtp_model_layer"):
        if hasattr(layer, name):
            return getattr(layer, name)
    return layer


def _before_experts(router: _Step, dispatch: _Step, crossing: _Crossing) -> _Step:
    def step(node: Any, hidden: Tensor) -> Tensor:
        with _postponed():
            tokens, probs = router(node, hidden)
        with departing(crossing.dispatch):
            edge: Tensor = dispatch(node, tokens, probs)
        return edge

    return step


def _experts(experts: _Step, moe: Any, crossing: _Crossing) -> _Step:
    def step(node: Any, edge: Tensor) -> Tensor:
        state, has_shared = node.layer_state, moe.use_shared_expert
        moe.use_shared_expert = False  # megatron-core 0.14 and 0.15 would run it here
        try:
            with opened(moe.experts.parameters()):  # before the arrivals: their gradients under the way back
                tokens, probs = crossing.dispatch
                crossing.dispatch.clear()
                state.dispatched_probs = probs.arrive(state.dispatched_probs)
                output = experts(node, tokens.arrive(edge))
        finally:
            moe.use_shared_expert = has_shared
        state.dispatched_probs = None
        with departing(crossing.combine):
            sent: Tensor = moe.token_dispatcher.token_combine(output)
        return sent

    return step


def _after_experts(combine: _Step, crossing: _Crossing) -> _Step:
    def step(node: Any, edge: Tensor, *shared: Tensor) -> Tensor:
        with arriving(crossing.combine):
            output: Tensor = combine(node, edge, *shared)
        return output

    return step


def _shared_expert(moe: Any) -> _Step:
    def step(node: Any, hidden: Tensor) -> Tensor:
        output: Tensor = moe.shared_experts(hidden)
        return output

    return step


def _normalised_at_end(mlp: _Step) -> _Step:
    """From 0.16 Megatron's steps have the decoder's final norm in those of a MoE layer alone."""

    def step(node: Any, hidden: Tensor) -> Tensor:
        output: Tensor = mlp(node, hidden)
        norm = node.chunk_state.model.decoder.final_layernorm
        if norm and node.is_last_layer and not node.is_mtp:
            output = norm(output)
        return output

    return step


@contextlib.contextmanager
def _postponed() -> Iterator[None]:
    token = _postponing.set(True)
    try:
        yield
    finally:
        _postponing.reset(token)


def postpone_shared_expert(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MoELayer.shared_experts_compute``: its input takes the place of its output for a while."""

    def shared_experts_compute(self: Any, hidden_states: Tensor) -> Any:
        if _postponing.get() and self.use_shared_expert:
            return hidden_states
        return original(self, hidden_states)

    return shared_experts_compute


def run_pair(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerLayerSchedulePlan.run``."""

    def run(
        f_layer: Any,
        b_layer: Any,
        f_input: Any = None,
        b_grad: Any = None,
        is_last_layer_in_bwd: bool = False,
    ) -> tuple[Any, Any]:
        plans = [plan for plan in (f_layer, b_layer) if plan is not None]
        if not all(hasattr(plan, "pieces") for plan in plans):  # of a model with layers of other kinds
            result: tuple[Any, Any] = original(f_layer, b_layer, f_input, b_grad, is_last_layer_in_bwd)
            return result
        forward, backward = (None if plan is None else plan.pieces for plan in (f_layer, b_layer))
        precision = contextlib.nullcontext if f_layer is None else f_layer.get_fp8_context
        if backward:
            b_grad = backward.backward_after(b_grad)
        if forward:
            with precision():
                f_input = forward.forward_before(f_input)
        if backward:
            b_grad = backward.backward_experts(b_grad)
        if forward:
            with precision():
                f_input = forward.forward_experts(f_input)
        if backward:
            b_grad = backward.backward_before(b_grad)
        if forward:
            with precision():
                f_input = forward.forward_after(f_input)
        return f_input, b_grad

    return run


def release_pieces(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerLayerSchedulePlan.release_state``."""

    def release_state(self: Any) -> None:
        self.pieces = None
        original(self)

    return release_state
