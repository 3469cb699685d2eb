"""The indexer's key and weights, projected while the main attention projects its latents.

Under sequence parallelism the indexer gathers the hidden states first, and on context parallel ranks keys
are shared: these it projects as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.operators.two_streams import side
from mindspeed_dsa.megatron.attribute_override import AttributeOverride, Function


class _Projected(NamedTuple):
    """Products of hidden states, on their way."""

    states: Tensor
    started: side.Started
    with_graph: bool


_projected: WeakKeyDictionary[Any, _Projected] = WeakKeyDictionary()
"""By indexer, from an attention's first step to the indexer's own."""


def project_beside(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.get_query_key_value_tensors``."""

    def get_query_key_value_tensors(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        indexer = getattr(self.core_attention, "indexer", None)
        if indexer is None:
            return original(self, hidden_states, *args, **kwargs)
        if (reason := _why_not(self.config)) is not None:
            context.log.info("the indexer projects when its turn comes: %s", reason, once=True)
            return original(self, hidden_states, *args, **kwargs)
        states = hidden_states.detach()  # the indexer's gradient ends here
        key, weights = indexer.linear_wk, indexer.linear_weights_proj
        started = side.start(lambda: (key(states)[0], weights(states)[0]), states, key, weights)
        _projected[indexer] = _Projected(states, started, torch.is_grad_enabled())
        try:
            return original(self, hidden_states, *args, **kwargs)
        except BaseException:
            _projected.pop(indexer, None)
            raise

    return get_query_key_value_tensors


def _why_not(config: Any) -> str | None:
    if config.context_parallel_size > 1:
        return "context parallel ranks share its keys"
    if config.sequence_parallel and config.tensor_model_parallel_size > 1:
        return "it gathers the hidden states under sequence parallelism"
    if getattr(config, "fine_grained_activation_offloading", False):
        return "activations are moved to the host on the other stream"
    return None


def take_projections(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the function of ``DSAIndexer`` that projects: in 0.16 it goes on to scores."""

    def project(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        projected = _projected.pop(self, None)
        if projected is None or not _are_same(x, projected.states):
            return original(self, x, *args, **kwargs)
        if torch.is_grad_enabled() and not projected.with_graph:
            # In the warm-up stage layers run without a graph, and their indexers with one.
            return original(self, x, *args, **kwargs)
        key, weights = projected.started.wait()
        early = AttributeOverride(
            self,
            linear_wk=Function(lambda _: (key, None)),
            linear_weights_proj=Function(lambda _: (weights, None)),
        )
        return original(early, x, *args, **kwargs)

    return project


def _are_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
