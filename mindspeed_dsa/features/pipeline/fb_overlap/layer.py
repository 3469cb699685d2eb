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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.pipeline.fb_overlap.feature import Options
from mindspeed_dsa.megatron.shared_expert import before_second_half, shared_expert_of
from mindspeed_dsa.megatron.split_layers import Passes, transformer_layer
from mindspeed_dsa.parallel.all_to_all import InFlight, arriving, departing
from mindspeed_dsa.parallel.weight_gradients import defer_gradients

# -- the order of two layers' pieces ----------------------------------------------------------------


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
        precision = contextlib.nullcontext if f_layer is None else _precision_of(f_layer)
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


def _precision_of(layer: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context that a layer computes in; fp8's alone, and called so, before 0.19.2."""
    make: Any = getattr(layer, "get_low_precision_context", None)
    return make or layer.get_fp8_context  # type: ignore[no-any-return]


def release_pieces(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerLayerSchedulePlan.release_state``."""

    def release_state(self: Any) -> None:
        self.pieces = None
        original(self)

    return release_state


def run_what_learns(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``ScheduleNode.default_backward_func``: autograd refuses tensors without a graph.

    Below the first weight that learns there are pieces without any, such as a frozen embedding.
    """

    def default_backward_func(self: Any, outputs: Sequence[Tensor], output_grad: Any) -> Any:
        if all(output.requires_grad for output in outputs):
            return original(self, outputs, output_grad)
        pairs = [pair for pair in zip(outputs, output_grad, strict=True) if pair[0].requires_grad]
        if pairs:
            original(self, *zip(*pairs, strict=True))
        return output_grad

    return default_backward_func


# -- cutting a layer's steps at its transfers -------------------------------------------------------

_Step = Callable[..., Any]
"""A node's forward: it gets the node and its inputs."""
_postponing: ContextVar[bool] = ContextVar("shared expert postponed", default=False)


def cut_at_transfers(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerLayerSchedulePlan._build_callable_nodes``: everything is queued in one place."""

    def _build_callable_nodes(
        self: Any, event: Any, comp_stream: Any, comm_stream: Any, extra_args: dict[str, Any]
    ) -> None:
        original(self, event, comp_stream, comp_stream, extra_args)
        layer = transformer_layer(self.layer)
        moe, shared = layer.mlp, None
        if hasattr(moe, "token_dispatcher"):
            handover, router = Handover(), until_dispatch(self)[-1]
            router.submodule = _before_experts(router.submodule, self.moe_dispatch.submodule, layer, handover)
            self.mlp.submodule = _experts(self.mlp.submodule, layer, handover)
            self.moe_combine.submodule = _after_experts(self.moe_combine.submodule, handover)
            self.mlp.free_input = self.moe_combine.free_input = False
            self.moe_dispatch = None
            if moe.use_shared_expert:
                node = type(self.mlp)(
                    comp_stream,
                    event,
                    self.layer_state,
                    self.chunk_state,
                    _shared_expert(moe, context),
                    name="shared_expert",
                    extra_args=extra_args,
                )
                shared = Shared(node, moe, self.layer_state, handover)
        elif not hasattr(self, "post_attn"):
            self.mlp.submodule = _normalised_at_end(self.mlp.submodule)
        self.pieces = Pieces(self, layer, shared)

    return _build_callable_nodes


def _before_experts(router: _Step, dispatch: _Step, layer: Any, handover: Handover) -> _Step:
    def step(node: Any, hidden: Tensor) -> Tensor:
        with _postponed():
            tokens, probs = router(node, hidden)
        if layer.recompute_pre_mlp_layernorm:
            handover.norm = layer.pre_mlp_norm_checkpoint
        with departing(handover.dispatch):
            edge: Tensor = dispatch(node, tokens, probs)
        return edge

    return step


def _experts(experts: _Step, layer: Any, handover: Handover) -> _Step:
    moe = layer.mlp

    def step(node: Any, edge: Tensor) -> Tensor:
        state = node.layer_state
        # The shared expert is a node of its own, and reads the norm's output when the experts have run:
        # neither may Megatron's step run the one nor free the other.
        with defer_gradients(
            moe.experts.parameters()
        ):  # before the arrivals: their gradients under the way back
            tokens, probs = handover.dispatch
            handover.dispatch.clear()
            state.dispatched_probs = probs.arrive(state.dispatched_probs)
            arrived = tokens.arrive(edge)
            with _off(moe, "use_shared_expert"), _off(layer, "recompute_pre_mlp_layernorm"):
                output = experts(node, arrived)
        if not moe.use_shared_expert:
            handover.discard_norm(output)
        state.dispatched_probs = None
        with departing(handover.combine):
            sent: Tensor = moe.token_dispatcher.token_combine(output)
        return sent

    return step


@contextlib.contextmanager
def _off(module: Any, name: str) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, False)
    try:
        yield
    finally:
        setattr(module, name, before)


def _after_experts(combine: _Step, handover: Handover) -> _Step:
    def step(node: Any, edge: Tensor, *shared: Tensor) -> Tensor:
        with arriving(handover.combine):
            output: Tensor = combine(node, edge, *shared)
        return output

    return step


def _shared_expert(moe: Any, context: Context[Options]) -> _Step:
    def step(node: Any, hidden: Tensor) -> Tensor:
        return shared_expert_of(moe, context.megatron)(hidden)

    return step


def _normalised_at_end(mlp: _Step) -> _Step:
    """Add the decoder's final norm, which from 0.16 Megatron has in the steps of a MoE layer alone."""

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


def until_dispatch(plan: Any) -> list[Any]:
    """Return the nodes before the dispatch: two in megatron-core 0.14 and 0.15, another name from 0.19."""
    names = ("attn", "pre_dispatch_computation", "post_attn")
    return [getattr(plan, name) for name in names if hasattr(plan, name)]


# -- pieces -----------------------------------------------------------------------------------------


@dataclass
class Handover:
    """Values that one forward hands from piece to piece. Refers to no graph but that of a norm's output.

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
        """Run attention, router and permutation; the dispatch is on its way."""
        others = [value for name, value in vars(self._state).items() if name != "model"]
        self._passes = Passes(self._layer, hidden, others)
        with self._passes.piece():
            for node in self._before:
                hidden = node.forward(hidden)
        return hidden

    def forward_experts(self, edge: Tensor) -> Any:
        """Run the experts between the shared expert's two halves; the combine is on its way."""
        assert self._passes is not None
        with self._passes.piece():
            if self._shared is None:
                return self._experts.forward(edge)
            return self._shared.forward(lambda: self._experts.forward(edge))

    def forward_after(self, edges: Any) -> Tensor:
        """Run what follows the combine, to the layer's output, ``[sequence, batch, hidden]``."""
        passes, self._passes = self._passes, None
        assert passes is not None
        with passes.piece():
            output: Tensor = self._prediction.forward(self._after.forward(edges))
        passes.ends(output)
        return output

    def backward_after(self, gradient: Tensor) -> Any:
        """Run backward up to the combine; its reverse is on its way."""
        return self._after.backward(self._prediction.backward(gradient))

    def backward_experts(self, edges: Any) -> Tensor:
        """Run backward of shared expert and experts; weight gradients run above the dispatch's reverse."""
        if self._shared is not None:
            edges = self._shared.backward(edges)
        received: Tensor = self._experts.backward(edges)
        return received

    def backward_before(self, gradient: Tensor) -> Tensor:
        """Run backward of the rest, to the gradient of the layer's input."""
        for node in reversed(self._before):
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
        self._node, self._moe, self._state = node, moe, state
        self._handover = handover
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
