"""Full recomputation of paired layers: only the input is saved, and backward repeats the forward.

The first forward builds no graph up to the combine. The piece after the combine has a graph, which saves only
token positions, no activations. In backward, the reverse combine therefore starts before any recomputation.
The recomputed forward ends with the experts and does not repeat the combine. Two pieces, marked R, are added
to the order of :mod:`layer`::

    B  after the combine                    starts the reversed combine
    R  up to the dispatch                   starts the dispatch, again
    F  up to the dispatch                   starts the dispatch
    R  shared expert and experts
    B  shared expert, inputs of experts     starts the reversed dispatch; then weights of experts
    F  shared expert and experts            starts the combine
    B  up to the dispatch
    F  after the combine

Each piece is recomputed with the random states of the first forward. Megatron's routers count losses and
tokens only if gradients are enabled, hence once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.pipeline.fb_overlap.pieces import Pieces, WithoutGraph, precision_of
from mindspeed_dsa.features.pipeline.recomputation import (
    RandomStates,
    as_in_forward,
    random_states,
    set_random_states,
)
from mindspeed_dsa.megatron.selection_source import Carrying
from mindspeed_dsa.megatron.split_layers import Companion, companion_of, transformer_layer
from mindspeed_dsa.parallel.weight_gradients import queueing_of_now
from mindspeed_dsa.platforms.host_pool import download


class Part(Enum):
    """Part of a layer to recompute."""

    LAYER = "the whole layer"
    EXPERTS = "all that follows attention"


def recomputed_part(plan: Any) -> Part | None:
    """Return the part of the layer that the recompute arguments select, or ``None``.

    Args:
        plan: Megatron's ``TransformerLayerSchedulePlan``.
    """
    config, layer = plan.layer.config, transformer_layer(plan.layer)
    if config.recompute_granularity == "full":
        # Each layer keeps its own input here; "uniform" would keep one for several layers.
        if config.recompute_method == "uniform":
            return Part.LAYER
        recomputed = list(plan.chunk_state.model.decoder.layers)[: config.recompute_num_layers]
        return Part.LAYER if any(each is plan.layer for each in recomputed) else None
    selective = config.recompute_granularity == "selective" and "moe" in config.recompute_modules
    return Part.EXPERTS if selective and hasattr(layer.mlp, "token_dispatcher") else None


class Recomputed:
    """Replacement for :class:`Pieces` that runs the pieces up to the experts twice.

    The second run can be at any time before backward needs its graph.

    Args:
        plan: Megatron's layer plan, with its nodes.
        build: function that builds the nodes for one forward and backward; called once per run.
        part: part of the layer to recompute.
        megatron: the session's accessor of Megatron's modules.
    """

    runs_again = True

    def __init__(self, plan: Any, build: Callable[[], Pieces], part: Part, megatron: Megatron) -> None:
        self._plan, self._build, self._part, self._megatron = plan, build, part, megatron
        self._layer = transformer_layer(plan.layer)
        self._first, self._again = build(), None  # type: Pieces, Pieces | None
        # Layers that share or replay a DSA selection read the same one in both runs.
        run: Callable[..., Tensor] = Pieces.forward_before
        self._run_before = Carrying(run) if part is Part.LAYER else run
        self._random: list[RandomStates] = []
        self._chunk: dict[str, Any] = {}
        self._dispatcher: dict[str, Any] = {}
        self._residual: WithoutGraph | None = None
        self._shared: WithoutGraph | None = None
        self._predicted: list[WithoutGraph] = []
        self._behind: list[WithoutGraph] = []
        self._edge: Tensor | None = None  # between the two recomputed pieces
        self._leaves_behind: list[Tensor] = []
        self._attention: _Attention | None = None
        self._routing: Tensor | None = None
        self._routes_alike: Callable[[], Tensor] | None = None

    # -- forward ----------------------------------------------------------------------------------

    def forward_before(self, hidden: Tensor) -> Tensor:
        """Run the first piece without a graph, or with the graph of attention only."""
        self._chunk, self._queueing = dict(vars(self._plan.chunk_state)), queueing_of_now()
        # A leaf, from which the second run starts.
        self._hidden = hidden.detach().requires_grad_(hidden.requires_grad)
        self._random.append(random_states(self._megatron))
        if self._part is Part.EXPERTS:
            self._attention = _Attention(self._layer, self._megatron)
            with self._attention.kept():
                edge = self._run_before(self._first, hidden)
            # The first node's input, which the node has detached.
            self._attention.begins_at(self._first.before[0].inputs[0])
        else:
            # Detached: Megatron adds the residual in grad mode, so a graph on the input would survive.
            with torch.no_grad():
                edge = self._run_before(self._first, hidden.detach(), followed=False)
        if hasattr(self._layer.mlp, "token_dispatcher"):
            # For the check that the second run routes alike.
            self._routing = self._layer.mlp.token_dispatcher.routing_map
        if self._learns():
            self._enter_before()
        return edge

    def _enter_before(self) -> None:
        """Detach the residual and MTP inputs, so that later pieces can backpropagate into them."""
        state, chunk = self._plan.layer_state, self._plan.chunk_state
        if getattr(state, "residual", None) is not None:
            self._residual = WithoutGraph(state.residual)
            state.residual = self._residual.enter(self._residual.edge)
        if self._layer is not self._plan.layer and self._part is Part.LAYER:
            # An MTP layer concatenates the decoder's output with its own.
            self._predicted = [WithoutGraph(hidden) for hidden in chunk.mtp_hidden_states]
            chunk.mtp_hidden_states = [entry.enter(entry.edge) for entry in self._predicted]

    def forward_experts(self, edge: Tensor) -> Any:
        """Run the second piece without a graph, and detach its results for the third piece."""
        self._random.append(random_states(self._megatron))
        with torch.no_grad():
            edges = self._first.forward_experts(edge)
        # Transfers through which the gradients of the second run's outputs return.
        self._combined = list(self._first.handover.combine)
        companion = self._companion()
        if companion is not None and self._runs_again():
            companion.leave_experts(self._enter_behind)
        edge, *beside = edges if isinstance(edges, tuple) else (edges,)
        edge = edge.detach().requires_grad_(self._learns("experts"))
        if self._first.shared is not None and self._learns("shared_experts"):
            state = self._plan.layer_state
            self._shared = WithoutGraph(beside[0] if beside else state.shared_expert_output)
            if beside:
                self._first.handover.shared, beside = self._shared, [self._shared.edge]
            else:
                state.shared_expert_output = self._shared.enter(self._shared.edge)
        return (edge, *beside) if beside else edge

    def _companion(self) -> Companion | None:
        dispatcher = getattr(self._layer.mlp, "token_dispatcher", None)
        return None if dispatcher is None else companion_of(dispatcher)

    def _enter_behind(self, value: Tensor) -> Tensor:
        self._behind.append(WithoutGraph(value))
        return self._behind[-1].enter(self._behind[-1].edge)

    def forward_after(self, edges: Any) -> Tensor:
        """Run the third piece with its graph, and release everything except the layer's input."""
        output = self._first.forward_after(edges)
        if self._runs_again():
            self._first.before, self._first.experts, self._first.shared = [], None, None
            for name in ("attn", "post_attn", "pre_dispatch_computation", "mlp"):
                if hasattr(self._plan, name):
                    setattr(self._plan, name, None)
            vars(self._plan.layer_state).clear()
        return output

    def _learns(self, name: str = "") -> bool:
        """Return whether the layer's input, or any weight before the experts or in ``name``, needs a
        gradient.
        """
        moe = self._layer.mlp
        modules = [getattr(moe, module, None) for module in ("experts", "shared_experts")]
        behind = {id(param) for module in modules if module is not None for param in module.parameters()}
        before = (param for param in self._plan.layer.parameters() if id(param) not in behind)
        part = getattr(moe, name, None) if name else None
        own_params: Iterable[Tensor] = () if part is None else part.parameters()
        return self._hidden.requires_grad or any(param.requires_grad for param in (*before, *own_params))

    def _runs_again(self) -> bool:
        return self._learns("experts") or self._learns("shared_experts")

    # -- backward ---------------------------------------------------------------------------------

    def backward_after(self, gradient: Tensor) -> Any:
        """Run backward of the third piece."""
        edges = self._first.backward_after(gradient)
        # The shared expert's gradient is in self._shared; its edge is of size 0.
        return edges[0] if isinstance(edges, tuple) else edges

    def recompute_before(self) -> None:
        """Run the first piece again, with a graph, unless that is done."""
        if self._again is not None or not self._runs_again():
            return
        # The second run starts with an empty state, as the first one did.
        self._plan.layer_state = type(self._plan.layer_state)()
        self._again = again = self._build()
        again.handover.combined = self._combined
        if hasattr(self._layer.mlp, "token_dispatcher"):
            # A state of the second run's own: other forwards use the dispatcher between its two pieces.
            self._dispatcher = dict(vars(self._layer.mlp.token_dispatcher))
        with self._as_in_forward(), contextlib.ExitStack() as stack:
            if self._attention is not None:
                stack.enter_context(self._attention.passed_over())
            self._edge = self._run_before(again, self._hidden, followed=False)
            self._leave_before(again)
        self._compare_routing()

    def _compare_routing(self) -> None:
        """Start an asynchronous check that the routing equals the first forward's."""
        first, self._routing = self._routing, None
        if first is not None:
            self._routes_alike = download((first == self._dispatcher["routing_map"]).all())

    def _require_same_routing(self) -> None:
        """Raise if the routing differs, because the combine of the first forward is not repeated."""
        routes_alike, self._routes_alike = self._routes_alike, None
        if routes_alike is not None and not routes_alike():
            raise RuntimeError(
                f"mindspeed_dsa: --moe-fb-overlap: layer {self._layer.layer_number}: "
                "tokens have other experts when the layer is recomputed than they had in forward, so "
                "gradients would be those of other rows; some operator before the router does not repeat "
                "its bits: train with --deterministic-mode, or omit --moe-fb-overlap or the recomputation"
            )

    def _leave_before(self, again: Pieces) -> None:
        """Pair the recomputed residual and MTP inputs with those that :meth:`_enter_before` detached."""
        state, chunk = self._plan.layer_state, self._plan.chunk_state
        self._leaves = [] if self._residual is None else [(state.residual, self._residual)]
        if self._predicted:
            node = again.router
            leaves = [node.detach(hidden) for hidden in chunk.mtp_hidden_states]
            self._leaves += zip(leaves, self._predicted, strict=True)

    def recompute_experts(self) -> None:
        """Run the second piece again, with a graph and without a combine, unless that is done."""
        self._require_same_routing()
        edge, self._edge = self._edge, None
        if edge is not None and self._again is not None:
            with self._as_in_forward():
                self._again.forward_experts(edge)
                if self._behind:
                    # Only this node cuts tensors of a companion after the router.
                    self._leaves_behind = list(self._again.experts.detached)
            self._dispatcher = {}

    @contextlib.contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._queueing())
            stack.enter_context(precision_of(self._plan))
            stack.enter_context(as_in_forward(self._megatron, self._random.pop(0)))
            stack.enter_context(_with_attributes(self._plan.chunk_state, self._chunk))
            # A layer's dispatcher serves all its forwards, and another forward may be between two steps.
            if self._dispatcher:
                stack.enter_context(_with_attributes(self._layer.mlp.token_dispatcher, self._dispatcher))
            yield

    def backward_experts(self, edge: Any) -> Tensor | None:
        """Run backward of the recomputed second piece."""
        if self._again is None:
            return None
        for leaf, entry in zip(self._leaves_behind, self._behind, strict=True):
            leaf.grad = entry.gradient
        if self._again.shared is not None:
            edge = (edge, None if self._shared is None else self._shared.gradient)
        return self._again.backward_experts(edge)

    def backward_before(self, gradient: Any) -> Tensor | None:
        """Run backward of the recomputed first piece, and of attention if its graph was kept."""
        again = self._again
        if again is not None:
            for leaf, entry in self._leaves:
                leaf.grad = entry.gradient
            gradient = again.backward_before(gradient)
            if self._attention is not None:
                gradient = self._attention.backward()
                self._plan.event.record()  # like a node, for nodes on another stream that follow
        # Break the reference cycle: the plan and the order of recomputation refer to this object.
        vars(self).clear()
        result: Tensor | None = gradient
        return result


class _Attention:
    """Attention that keeps its graph while the rest of the layer is recomputed.

    Args:
        layer: Megatron's transformer layer.
        megatron: the session's accessor of Megatron's modules.
    """

    def __init__(self, layer: Any, megatron: Megatron) -> None:
        self._layer, self._megatron = layer, megatron
        self._input: Tensor | None = None
        self._output: Any = None
        self._leaf: Any = None
        self._context: Any = None

    def begins_at(self, leaf: Tensor) -> None:
        """Set the leaf tensor at which attention's graph starts."""
        self._input = leaf

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Context of the first forward: build only attention's graph."""
        attend = self._layer._forward_attention

        def forward_attention(*args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad():
                self._output, self._context = attend(*args, **kwargs)
            self._random = random_states(self._megatron)
            self._leaf = self._output.detach().requires_grad_(self._output.requires_grad)
            torch.set_grad_enabled(False)  # until the end of the block
            # The norm before the experts is recomputed with the rest.
            self._layer.recompute_pre_mlp_layernorm = False
            return self._output.detach(), self._context

        with self._replaced(forward_attention), torch.enable_grad():
            yield

    @contextlib.contextmanager
    def passed_over(self) -> Iterator[None]:
        """Context of the recomputation: reuse attention's output instead of running attention."""

        def forward_attention(*_: Any, **__: Any) -> Any:
            set_random_states(self._megatron, self._random)
            return self._leaf, self._context

        with self._replaced(forward_attention):
            yield

    @contextlib.contextmanager
    def _replaced(self, forward_attention: Callable[..., Any]) -> Iterator[None]:
        layer = self._layer
        norm, layer.recompute_pre_mlp_layernorm = layer.recompute_pre_mlp_layernorm, False
        layer._forward_attention = forward_attention
        try:
            yield
        finally:
            del layer._forward_attention
            layer.recompute_pre_mlp_layernorm = norm

    def backward(self) -> Tensor | None:
        """Run attention's backward and return the gradient of the layer's input."""
        if self._output.requires_grad:
            torch.autograd.backward(self._output, self._leaf.grad)
        return None if self._input is None else self._input.grad


@contextlib.contextmanager
def _with_attributes(of: Any, values: dict[str, Any]) -> Iterator[None]:
    """Swap ``vars(of)`` for ``values`` inside the block, and write the changes back to ``values``."""
    attributes = vars(of)
    before = dict(attributes)
    attributes.clear()
    attributes.update(values)
    try:
        yield
    finally:
        values.clear()
        values.update(attributes)
        attributes.clear()
        attributes.update(before)
