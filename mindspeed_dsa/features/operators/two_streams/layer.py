"""Runs the indexer's projections and the shared expert on the second stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.operators.two_streams.feature import Options
from mindspeed_dsa.megatron import second_stream
from mindspeed_dsa.megatron.attribute_override import AttributeOverride
from mindspeed_dsa.megatron.dsa import shares_keys
from mindspeed_dsa.megatron.second_stream import Projected
from mindspeed_dsa.megatron.shared_expert import SharedOutput
from mindspeed_dsa.megatron.two_streams import FLAG


def _is_worth(hidden_states: Tensor, context: Context[Options]) -> bool:
    worth = second_stream.is_worth(context.options.streams, hidden_states)
    if not worth:
        tokens = hidden_states[..., 0].numel()
        context.log.info("one stream for %d tokens a rank; %s-min-tokens decides", tokens, FLAG, once="few")
    return worth


def say_how_many(context: Context[Options]) -> None:
    """Log if the platform has only one stream, or if another feature already overlaps the shared expert."""
    platform = platforms.current()
    if not platform.asynchronous:
        context.log.info("%s: %s has one stream, so everything runs in turns", FLAG, platform.name, once=True)
    if elsewhere := context.options.streams.shared_elsewhere:
        context.log.info("%s: the shared expert runs under transfers, by %s", FLAG, elsewhere, once=True)


# -- indexer: projects key and weights while the main attention projects its latents ------------------
#
# Under sequence parallelism Megatron's indexer first gathers the hidden states; the second stream does that,
# too. Context parallel ranks that share keys only project their own tokens.


def project_beside(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_query_key_value_tensors`` to run the indexer's projections on the second stream.

    ``MLASelfAttention`` has this method, and since 0.19 its absorbed form too. Layers that reuse another
    layer's selection have no indexer. The current stream waits for the projections after attention's own
    projections, so no work remains on the second stream even if the indexer is not called.
    """

    def get_query_key_value_tensors(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        indexer = getattr(self.core_attention, "indexer", None)
        if indexer is None or not _is_worth(hidden_states, context):
            return original(self, hidden_states, *args, **kwargs)
        if (reason := _why_not(self.config, indexer)) is not None:
            context.log.info("the indexer projects when its turn comes: %s", reason, once=True)
            return original(self, hidden_states, *args, **kwargs)
        states = hidden_states.detach()  # the indexer's loss does not train the rest of the model
        key, weights = indexer.linear_wk, indexer.linear_weights_proj
        gather = _gather_of(self.config, indexer, context)

        def project() -> tuple[Tensor, ...]:
            rows = states if gather is None else gather(states)
            return rows, key(rows)[0], weights(rows)[0]

        # Starts before attention's own projections, and is awaited after them: both run at the same time.
        started = second_stream.start(project, states, key, weights)
        result = original(self, hidden_states, *args, **kwargs)
        rows, own_key, own_weights = started.wait()
        projected = Projected(states, rows, own_key, own_weights, torch.is_grad_enabled())
        second_stream.put_projected(indexer, projected)
        return result

    return get_query_key_value_tensors


def _why_not(config: Any, indexer: Any) -> str | None:
    if getattr(config, "fine_grained_activation_offloading", False):
        return "activations are moved to the host on the other stream"
    if any(map(second_stream.gathers_for_itself, (indexer.linear_wk, indexer.linear_weights_proj))):
        return "FSDP2 gathers its weights by themselves"
    return None


def _gather_of(config: Any, indexer: Any, context: Context[Options]) -> Callable[[Tensor], Tensor] | None:
    """Return the function that gathers hidden states before the indexer's projections, or None."""
    ranks_share = config.context_parallel_size > 1 and shares_keys(config, context.options.dsa)
    if ranks_share or not _is_split(config, indexer):
        return None
    return _over_ranks(indexer, context)


def _is_split(config: Any, indexer: Any) -> bool:
    return bool(config.sequence_parallel and indexer.pg_collection.tp.size() > 1)


def _over_ranks(indexer: Any, context: Context[Options]) -> Callable[[Tensor], Tensor]:
    gather = context.megatron("core.tensor_parallel").gather_from_sequence_parallel_region

    def gathered(rows: Tensor) -> Tensor:
        result: Tensor = gather(rows, group=indexer.pg_collection.tp)
        return result

    return gathered


def take_projections(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate the projection method of ``DSAIndexer`` to reuse results computed on the second stream."""

    # In 0.16 the method also computes the scores.
    def project(self: Any, x: Tensor, qr: Tensor, *args: Any, **kwargs: Any) -> Any:
        projected = second_stream.take_projected(self, x)
        if projected is None or projected.is_gathered != _is_split(self.config, self):
            return original(self, x, qr, *args, **kwargs)
        early = second_stream.view_with_projected(self, projected)
        if projected.is_gathered:
            # Both inputs are gathered already, so switch the setting off to keep Megatron from gathering
            # them.
            whole = AttributeOverride(self.config, sequence_parallel=False)
            early = AttributeOverride(early, config=whole)
            x, qr = projected.rows, _over_ranks(self, context)(qr)
        return original(early, x, qr, *args, **kwargs)

    return project


# -- shared expert: runs in parallel with router and experts, awaited where its output is added -------


class _Beside(SharedOutput):
    """Output of the shared expert, computed on the second stream."""

    def __init__(self, started: second_stream.Started) -> None:
        self._started = started

    @property
    def tensor(self) -> Tensor:
        """Output tensor; makes the current stream wait for it."""
        return self._started.wait()[0]


def _shares_buffer(config: Any) -> bool:
    """Return whether dispatcher and linear layers gather rows into the same global buffer of Megatron."""
    splits_rows = config.sequence_parallel and config.tensor_model_parallel_size > 1
    return bool(splits_rows and config.moe_token_dispatcher_type == "allgather")


def compute_beside(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``MoELayer.shared_experts_compute``: start it on the second stream, and return at once."""

    def shared_experts_compute(self: Any, hidden_states: Tensor) -> Any:
        streams = context.options.streams
        if (
            not self.use_shared_expert
            or self.shared_expert_overlap
            or streams.shared_elsewhere
            or not _is_worth(hidden_states, context)
        ):
            return original(self, hidden_states)
        reason = None
        if context.options.overlaps_tp and self.config.tensor_model_parallel_size > 1:
            reason = "overlapped tensor parallel communication has buffers for one stream"
        elif _shares_buffer(self.config):
            reason = "the allgather dispatcher and sequence parallel layers share a buffer for one stream"
        elif second_stream.gathers_for_itself(self.shared_experts):
            reason = "FSDP2 gathers its weights by themselves"
        if reason is not None:
            context.log.info("the shared expert runs in its turn: %s", reason, once=True)
            return original(self, hidden_states)
        return _Beside(
            second_stream.start(lambda: (original(self, hidden_states),), hidden_states, self.shared_experts)
        )

    return shared_experts_compute
