"""Stages of one half's forward through a transformer layer, with transfers in flight between them.

For ``overlap_moe_expert_parallel_comm``, Megatron splits a layer into functions: attention with norm, router
and permutation; dispatch; experts; combine with the rest of the layer. Here these functions run in one graph.
A transfer starts at the end of one stage, and its wait follows after the other half has computed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.batch_overlap.choice import State
from mindspeed_dsa.features.moe.batch_overlap.feature import Options
from mindspeed_dsa.features.moe.batch_overlap.keys import Keys
from mindspeed_dsa.features.moe.batch_overlap.routing import Routing
from mindspeed_dsa.megatron.attribute_override import attributes
from mindspeed_dsa.megatron.indexer_loss import part_of_loss
from mindspeed_dsa.megatron.shared_expert import SharedOutput
from mindspeed_dsa.megatron.split_layers import Passes
from mindspeed_dsa.parallel.all_to_all import InFlight, launching, returning, wait_now
from mindspeed_dsa.parallel.names import named, of_half


class Stages:
    """Forward of one half through a layer. Call the stages in the order in which they are defined.

    Args:
        layer: Megatron's transformer layer with an MoE layer.
        number: index of the half, 0 or 1.
        hidden: hidden states of the half, ``[sequence, batch, hidden]``.
        arguments: other arguments of the layer's forward.
        keys: attention state of both halves if they are tokens of the same sequence, or ``None``.
        share: the half's fraction of the microbatch.
        context: context of the feature.
        waits: whether to wait for each transfer right after its start, without overlap.

    Attributes:
        routing: router state of both halves.
    """

    def __init__(
        self,
        layer: Any,
        number: int,
        hidden: Tensor,
        arguments: Mapping[str, Any],
        routing: Routing,
        keys: Keys | None,
        share: float,
        context: Context[Options],
        *,
        waits: bool,
    ) -> None:
        self._layer, self._moe, self.routing, self._waits = layer, layer.mlp, routing, waits
        self._number, self._state = number, context.state(State)
        self._hidden: Any = hidden
        self._keys, self._share = keys, share
        self._dispatcher = copy.copy(layer.mlp.token_dispatcher)
        self._node = _Node(arguments)
        callables = context.megatron("core.models.gpt.fine_grained_callables")
        steps = callables.build_transformer_layer_callables(layer)[0]
        # Before 0.16, router and attention are two separate steps.
        # Skipped: the dispatch, since it must not wait here, and the step for MTP.
        *self._before, _, self._experts, self._combine, _ = steps
        self._passes = Passes(layer, hidden, list(arguments.values()))
        self._dispatched: list[InFlight] = []
        self._combined: list[InFlight] = []
        self._norm: Any = None
        self._shared: SharedOutput | Tensor | None = None

    # -- stages -----------------------------------------------------------------------------------

    def attend(self) -> None:
        """Run attention, norm, router and permutation, and exchange token counts."""
        layer, hidden = self._layer, self._hidden
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._stage())
            stack.enter_context(part_of_loss(layer.config, self._share))
            if self._keys is not None:
                stack.enter_context(self._keys.of_half())
            for step in self._before[:-1]:
                hidden = step(self._node, hidden)
            self._hidden = self._before[-1](self._node, hidden)
            if layer.recompute_pre_mlp_layernorm:
                self._norm = layer.pre_mlp_norm_checkpoint

    def dispatch(self) -> None:
        """Start the dispatch of the hidden states and probabilities."""
        with self._stage(), named("dispatch", self._moe.layer_number), launching(self._dispatched):
            self._dispatcher.token_dispatch(*self._hidden)
        self._hidden = None
        if self._waits:
            wait_now(self._dispatched)

    def arrive(self) -> None:
        """Wait for the dispatched hidden states and probabilities."""
        self._hidden, self._node.layer_state.dispatched_probs = (flight.wait() for flight in self._dispatched)

    def compute(self) -> None:
        """Run the routed experts."""
        with self._stage(), attributes(self._layer, recompute_pre_mlp_layernorm=False):
            output = self._experts(self._node, self._hidden)
        if isinstance(output, tuple):  # before 0.16 this step also returns the shared expert's output
            output, self._shared = output
        self._hidden = output

    def compute_shared(self) -> None:
        """Run the shared expert unless it has run already."""
        shared = self._shared
        if isinstance(shared, SharedOutput):
            with self._stage():
                shared.compute()
            self._shared = shared.tensor
        # The norm is recomputed on the gradient of whichever output was computed last, since backward
        # reaches that one first.
        norm, self._norm = self._norm, None
        if norm is not None:
            norm.discard_output_and_register_recompute(self._hidden if self._shared is None else self._shared)

    def combine(self) -> None:
        """Start the combine of the experts' outputs."""
        with self._stage(), named("combine", self._moe.layer_number), launching(self._combined):
            self._dispatcher.token_combine(self._hidden)
        self._hidden = None
        if self._waits:
            wait_now(self._combined)

    def land(self) -> None:
        """Wait for the combine."""
        self._hidden = self._combined[0].wait()

    def finish(self) -> Tensor:
        """Return the layer's output for the half, ``[sequence, batch, hidden]``."""
        state, shared = self._node.layer_state, self._shared
        beside: tuple[Any, ...] = ()
        if hasattr(state, "shared_expert_output"):
            state.shared_expert_output = shared
        elif shared is not None:
            beside = (shared,)
        with self._stage(), returning(self._hidden):
            output: Tensor = self._combine(self._node, self._hidden, *beside)
        self._passes.ends(output)
        self._hidden = self._shared = None
        return output

    # -- surroundings -----------------------------------------------------------------------------

    def postpone(self, shared: SharedOutput | None) -> SharedOutput | None:
        """Store the shared expert for :meth:`compute_shared`."""
        self._shared = shared
        return shared

    @contextlib.contextmanager
    def _stage(self) -> Iterator[None]:
        moe = self._moe
        before, dispatcher, self._state.half = self._state.half, moe.token_dispatcher, self
        moe.token_dispatcher = self._dispatcher  # each half has its own; a dispatcher serves one forward
        try:
            with self._passes.piece(), of_half(self._number):
                yield
        finally:
            moe.token_dispatcher = dispatcher
            self._state.half = before


class _Node:
    """Stand-in for Megatron's schedule node. Its ``detach`` does nothing; the graph stays connected."""

    is_mtp = is_last_layer = False

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        model = SimpleNamespace(decoder=SimpleNamespace(final_layernorm=None))
        self.layer_state = SimpleNamespace()
        self.chunk_state = SimpleNamespace(**arguments, model=model)

    @staticmethod
    def detach(value: Any) -> Any:
        return value
