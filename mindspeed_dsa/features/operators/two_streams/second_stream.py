"""Work on a second stream, results of which the first uses: the indexer's projections, the shared expert.

Backward needs nothing of its own: autograd runs a node on the stream of its forward, and makes streams wait
for each other's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.megatron.attribute_override import AttributeOverride, Function
from mindspeed_dsa.megatron.gathered_weights import wait_for_all_weights
from mindspeed_dsa.megatron.shared_expert import SharedOutput

_streams: WeakKeyDictionary[platforms.Platform, Any] = WeakKeyDictionary()
"""Second stream of each platform, one for all layers."""


class Started:
    """Tensors that the second stream computes."""

    def __init__(self, tensors: tuple[Tensor, ...], done: Any) -> None:
        self._tensors, self._done = tensors, done

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors, for work on the current stream from here on."""
        platform = platforms.current()
        stream = platform.current_stream()
        stream.wait_event(self._done)
        for tensor in self._tensors:
            platform.record_stream(tensor, stream)
        return self._tensors


def start(compute: Callable[[], tuple[Tensor, ...]], states: Tensor, *modules: nn.Module) -> Started:
    """Compute on the second stream, behind what the current one has been given so far.

    Args:
        compute: reads the states and the modules' weights, and what is older than this step.
        states: of the current stream.
        modules: whose weights may still be on their way to the current stream.
    """
    for module in modules:
        wait_for_all_weights(module)
    platform = platforms.current()
    stream = _second(platform)
    ready, done = platform.new_event(), platform.new_event()
    ready.record()
    stream.wait_event(ready)
    with platform.use_stream(stream):
        tensors = compute()
        done.record()
    platform.record_stream(states, stream)
    return Started(tensors, done)


def _second(platform: platforms.Platform) -> Any:
    if platform not in _streams:
        _streams[platform] = platform.new_stream()
    return _streams[platform]


def say_how_many(context: Context[None]) -> None:
    """Say where there is one stream only: the flag is for other machines then."""
    platform = platforms.current()
    if not platform.asynchronous:
        context.log.info(
            "--two-streams: %s has one stream, so everything runs in turns", platform.name, once=True
        )


# -- the indexer's key and weights, projected while the main attention projects its latents -----------
#
# Under sequence parallelism the indexer gathers the hidden states first, and on context parallel ranks keys
# are shared: these it projects as ever.


class _Projected(NamedTuple):
    """Products of hidden states, on their way."""

    states: Tensor
    started: Started
    with_graph: bool


_projected: WeakKeyDictionary[Any, _Projected] = WeakKeyDictionary()
"""Products by indexer, from an attention's first step to the indexer's own."""


def project_beside(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``get_query_key_value_tensors`` of ``MLASelfAttention``, or of 0.19's absorbed form.

    A layer that shares another one's selection has no indexer.
    """

    def get_query_key_value_tensors(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        indexer = getattr(self.core_attention, "indexer", None)
        if indexer is None:
            return original(self, hidden_states, *args, **kwargs)
        if (reason := _why_not(self.config)) is not None:
            context.log.info("the indexer projects when its turn comes: %s", reason, once=True)
            return original(self, hidden_states, *args, **kwargs)
        states = hidden_states.detach()  # the indexer's gradient ends here
        key, weights = indexer.linear_wk, indexer.linear_weights_proj
        started = start(lambda: (key(states)[0], weights(states)[0]), states, key, weights)
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


# -- the shared expert beside the router and the experts, awaited where its output is added -----------


class _Beside(SharedOutput):
    """Output that the second stream computes."""

    def __init__(self, started: Started) -> None:
        self._started = started

    @property
    def tensor(self) -> Tensor:
        """Return the output, for the current stream."""
        return self._started.wait()[0]


def compute_beside(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``MoELayer.shared_experts_compute``."""

    def shared_experts_compute(self: Any, hidden_states: Tensor) -> Any:
        if not self.use_shared_expert or self.shared_expert_overlap:
            return original(self, hidden_states)
        if self.config.tensor_model_parallel_size > 1:
            context.log.info(
                "the shared expert runs in its turn: it communicates with tensor parallel ranks",
                once=True,
            )
            return original(self, hidden_states)
        return _Beside(start(lambda: (original(self, hidden_states),), hidden_states, self.shared_experts))

    return shared_experts_compute
