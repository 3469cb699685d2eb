"""Transformer layer split at its all-to-alls, so that a forward and a backward overlap.

Megatron's paired schedule runs a layer's forward (F) together with the backward (B) of another microbatch's
layer. Each layer is split into parts (here called pieces) with separate autograd graphs. Megatron's
all-to-alls block. Here a piece ends by starting a transfer, and the next piece begins by waiting for it, in
forward and in backward. The work in between hides the transfer::

    B  after the combine                    starts the reversed combine
    F  up to the dispatch                   starts the dispatch
    B  shared expert, inputs of experts     starts the reversed dispatch; then weights of experts
    F  shared expert and experts            starts the combine
    B  up to the dispatch
    F  after the combine

An unpaired forward or backward, as in warmup and cooldown, runs only its own lines. Its transfers are then
hidden only by the shared expert and the weight gradients. The order is the same on all ranks, as collectives
require.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.pipeline.fb_overlap.feature import Options
from mindspeed_dsa.features.pipeline.fb_overlap.permutation import Nodes, permute, postponed, serves
from mindspeed_dsa.features.pipeline.fb_overlap.pieces import (
    Handover,
    Pieces,
    Shared,
    precision_of,
    until_dispatch,
)
from mindspeed_dsa.features.pipeline.fb_overlap.recompute import Recomputed, recomputed_part
from mindspeed_dsa.megatron.attribute_override import attributes
from mindspeed_dsa.megatron.shared_expert import shared_expert_of
from mindspeed_dsa.megatron.split_layers import (
    companion_of,
    in_pieces,
    running_in_pieces,
    transformer_layer,
)
from mindspeed_dsa.parallel.all_to_all import arriving, departed, departing
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.parallel.weight_gradients import are_queued, defer_gradients

# -- the order of two layers' pieces ----------------------------------------------------------------


def run_pair(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TransformerLayerSchedulePlan.run``: run the pieces of forward and backward in this order."""

    def run(
        f_layer: Any,
        b_layer: Any,
        f_input: Any = None,
        b_grad: Any = None,
        is_last_layer_in_bwd: bool = False,
    ) -> tuple[Any, Any]:
        plans = [plan for plan in (f_layer, b_layer) if plan is not None]
        # Models with layers of another kind have plans without pieces.
        if not all(hasattr(plan, "pieces") for plan in plans):
            result: tuple[Any, Any] = original(f_layer, b_layer, f_input, b_grad, is_last_layer_in_bwd)
            return result
        forward, backward = (None if plan is None else plan.pieces for plan in (f_layer, b_layer))
        if backward:
            b_grad = backward.backward_after(b_grad)
            backward.recompute_before()
        if forward:
            with precision_of(f_layer):
                f_input = forward.forward_before(f_input)
        if backward:
            backward.recompute_experts()
            b_grad = backward.backward_experts(b_grad)
        if forward:
            with precision_of(f_layer):
                f_input = forward.forward_experts(f_input)
        if backward:
            b_grad = backward.backward_before(b_grad)
        if forward:
            with precision_of(f_layer):
                f_input = forward.forward_after(f_input)
        return f_input, b_grad

    return run


def release_pieces(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TransformerLayerSchedulePlan.release_state``: release the pieces as well."""

    def release_state(self: Any) -> None:
        self.pieces = None
        original(self)

    return release_state


def run_what_learns(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ScheduleNode.default_backward_func``: skip outputs without a graph, on which autograd fails."""

    def default_backward_func(self: Any, outputs: Sequence[Tensor], output_grad: Any) -> Any:
        # Nodes below the first trained weight, such as a frozen embedding, have no graph.
        if all(output.requires_grad for output in outputs):
            return original(self, outputs, output_grad)
        pairs = [pair for pair in zip(outputs, output_grad, strict=True) if pair[0].requires_grad]
        if pairs:
            original(self, *zip(*pairs, strict=True))
        return output_grad

    return default_backward_func


# -- cutting a layer's steps at its transfers -------------------------------------------------------

_Step = Callable[..., Any]
"""Forward function of a node; takes the node and its inputs."""


def cut_at_transfers(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Wrap ``TransformerLayerSchedulePlan._build_callable_nodes``: build the layer's :class:`Pieces`."""

    def _build_callable_nodes(
        self: Any, event: Any, comp_stream: Any, comm_stream: Any, extra_args: dict[str, Any]
    ) -> None:
        def build() -> Pieces:
            original(self, event, comp_stream, comp_stream, extra_args)
            return _cut(self, comp_stream, event, extra_args, context)

        part = recomputed_part(self)
        self.pieces = build() if part is None else Recomputed(self, build, part, context.megatron)

    return _build_callable_nodes


def _cut(plan: Any, stream: Any, event: Any, extra_args: dict[str, Any], context: Context[Options]) -> Pieces:
    layer = transformer_layer(plan.layer)
    moe, shared, handover = layer.mlp, None, Handover()
    permutation, choose_stream = None, None

    def make(step: _Step, name: str) -> Any:
        state, chunk = plan.layer_state, plan.chunk_state
        return type(plan.mlp)(stream, event, state, chunk, step, name=name, extra_args=extra_args)

    if hasattr(moe, "token_dispatcher"):
        router, dispatch = until_dispatch(plan)[-1], _dispatch(plan.moe_dispatch.submodule, moe, handover)
        apart = serves(layer, context.options)
        router.submodule = _before_experts(router.submodule, None if apart else dispatch, layer, handover)
        plan.mlp.submodule = _experts(plan.mlp.submodule, layer, handover)
        plan.moe_combine.submodule = _after_experts(plan.moe_combine.submodule, handover)
        plan.mlp.free_input = plan.moe_combine.free_input = False
        # The dispatch is a part of other nodes now.
        plan.moe_dispatch = None
        if apart:
            permutation = make(permute(moe, dispatch, handover), "permutation")
            # A chunk's last output, with the final norm, is read on the first stream, so it stays there.
            nodes = [permutation] if plan.moe_combine.is_last_layer else [permutation, plan.moe_combine]
            choose_stream = Nodes(moe.token_dispatcher, stream, nodes, context.options.streams).choose_stream
        if moe.use_shared_expert:
            node = make(_shared_expert(moe, context), "shared_expert")
            shared = Shared(node, moe, plan.layer_state, handover)
    # A dense layer since 0.16.
    elif not hasattr(plan, "post_attn"):
        plan.mlp.submodule = _normalised_at_end(plan.mlp.submodule)
    return Pieces(plan, layer, shared, handover, permutation, choose_stream)


def _before_experts(router: _Step, dispatch: _Step | None, layer: Any, handover: Handover) -> _Step:
    """Build the first piece's last step: the router, and if ``dispatch`` is given, the dispatch."""

    def step(node: Any, hidden: Tensor) -> Any:
        permuted = contextlib.nullcontext() if dispatch else postponed(layer.mlp, handover)
        with running_in_pieces(layer.mlp.token_dispatcher), permuted:
            tokens, probs = router(node, hidden)
        if layer.recompute_pre_mlp_layernorm:
            handover.norm = layer.pre_mlp_norm_checkpoint
        return (tokens, probs) if dispatch is None else dispatch(node, tokens, probs)

    return step


def _dispatch(dispatch: _Step, moe: Any, handover: Handover) -> _Step:
    def step(node: Any, tokens: Tensor, probs: Tensor) -> Tensor:
        with named("dispatch", moe.layer_number), departing(handover.dispatch):
            edge: Tensor = dispatch(node, tokens, probs)
        if (companion := companion_of(moe.token_dispatcher)) is not None:
            companion.leave_router(node.detach)
        return edge

    return step


def _experts(experts: _Step, layer: Any, handover: Handover) -> _Step:
    moe = layer.mlp

    def step(node: Any, edge: Tensor) -> Tensor:
        state, companion = node.layer_state, companion_of(moe.token_dispatcher)
        if companion is not None:
            companion.enter_experts()
        # Megatron's step must neither run the shared expert nor free the norm's output: the shared expert
        # is a node of its own, and reads that output after the experts have run.
        # Created before the arrivals, so that weight gradients run under the reversed dispatch. A schedule
        # with a split backward queues them instead.
        with contextlib.nullcontext() if are_queued() else defer_gradients(moe.experts.parameters()):
            tokens, probs = handover.dispatch
            handover.dispatch.clear()
            state.dispatched_probs = probs.arrive(state.dispatched_probs)
            arrived = tokens.arrive(edge)
            with (
                attributes(moe, use_shared_expert=False),
                attributes(layer, recompute_pre_mlp_layernorm=False),
            ):
                output = experts(node, arrived)
        if not moe.use_shared_expert:
            handover.discard_norm(output)
        state.dispatched_probs = None
        # A recomputed forward sends no combine, since the first forward has sent it.
        sends = departed(handover.combined) if handover.combined else departing(handover.combine)
        with named("combine", moe.layer_number), sends:
            sent: Tensor = moe.token_dispatcher.token_combine(output)
        if companion is not None:
            companion.leave_experts(node.detach)
        return sent

    return step


def _after_experts(combine: _Step, handover: Handover) -> _Step:
    def step(node: Any, edge: Tensor, *shared: Tensor) -> Tensor:
        if handover.shared is not None:
            # A recomputed layer's shared output has no graph; entering it collects its gradient.
            shared = tuple(handover.shared.enter(each) for each in shared)
        with arriving(handover.combine):
            output: Tensor = combine(node, edge, *shared)
        return output

    return step


def _shared_expert(moe: Any, context: Context[Options]) -> _Step:
    def step(node: Any, hidden: Tensor) -> Tensor:
        return shared_expert_of(moe, context.megatron)(hidden)

    return step


def _normalised_at_end(mlp: _Step) -> _Step:
    """Append the decoder's final norm to a dense layer; since 0.16 Megatron only does so for MoE layers."""

    def step(node: Any, hidden: Tensor) -> Tensor:
        output: Tensor = mlp(node, hidden)
        norm = node.chunk_state.model.decoder.final_layernorm
        if norm and node.is_last_layer and not node.is_mtp:
            output = norm(output)
        return output

    return step


def postpone_shared_expert(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MoELayer.shared_experts_compute``: return the input; a separate node runs the expert later."""

    def shared_experts_compute(self: Any, hidden_states: Tensor) -> Any:
        if in_pieces(self.token_dispatcher) and self.use_shared_expert:
            return hidden_states
        return original(self, hidden_states)

    return shared_experts_compute
