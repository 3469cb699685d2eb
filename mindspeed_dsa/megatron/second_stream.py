"""A second stream of the device, for work that needs nothing of what the first one has been given since.

Backward needs little of its own: autograd runs a node on the stream of its forward, and makes streams wait
for each other's gradients. Weights' gradients are the exception: nobody waits for those that a later hook
reads from the parameter. So the nodes that accumulate them belong to the first stream, which autograd then
makes wait for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mindspeed_dsa import platforms
from mindspeed_dsa.megatron.attribute_override import AttributeOverride, Function
from mindspeed_dsa.megatron.gathered_weights import wait_for_all_weights
from mindspeed_dsa.megatron.two_streams import LEAST_TOKENS, Streams

_streams: WeakKeyDictionary[platforms.Platform, Any] = WeakKeyDictionary()
"""Second stream of each platform, one for all layers."""


def second() -> Any:
    """Return the second stream."""
    platform = platforms.current()
    if platform not in _streams:
        _streams[platform] = platform.new_stream()
    return _streams[platform]


def is_worth(streams: Streams, states: Tensor) -> bool:
    """Return whether work on hidden states, ``[sequence, batch, hidden]``, belongs on the second stream.

    On a CPU, where there is nothing to wait for, it does whatever the size.
    """
    platform, least = platforms.current(), streams.least_tokens
    if least is None:
        least = LEAST_TOKENS.get(platform.name, 0)
    large = states[..., 0].numel() >= least
    return streams.second and (large or not platform.asynchronous)


def keep_for(stream: Any, tensors: Iterable[Tensor]) -> None:
    """Keep the memory of tensors from being given away before a stream that did not make them is done."""
    platform = platforms.current()
    for tensor in tensors:
        if tensor.device.type == platform.device_type:
            platform.record_stream(tensor, stream)


class Started:
    """Tensors that the second stream computes."""

    def __init__(self, tensors: tuple[Tensor, ...], done: Any) -> None:
        self._tensors, self._done = tensors, done

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors, for work on the current stream from here on."""
        stream = platforms.current().current_stream()
        stream.wait_event(self._done)
        keep_for(stream, self._tensors)
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
    held = _accumulators(modules)
    platform = platforms.current()
    stream = second()
    ready, done = platform.new_event(), platform.new_event()
    ready.record()
    stream.wait_event(ready)
    with platform.use_stream(stream):
        tensors = compute()
        done.record()
    del held  # the graph has them now
    keep_for(stream, [states])
    return Started(tensors, done)


def _accumulators(modules: Iterable[nn.Module]) -> list[Any]:
    """Make the nodes that accumulate weights' gradients, on the current stream, unless there are any."""
    if not torch.is_grad_enabled():
        return []
    return [
        torch.autograd.graph.get_gradient_edge(weight).node
        for module in modules
        for weight in module.parameters()
        if weight.requires_grad
    ]


def gathers_for_itself(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers and frees weights in calls of this module, or of one inside of it.

    It does so on the stream of the call, and is told by nobody that another one reads them.
    """
    return any(hasattr(each, "_get_fsdp_state") for each in module.modules())


# -- products of hidden states that an indexer finds computed --------------------------------------


class Projected(NamedTuple):
    """Products of one forward.

    Attributes:
        states: hidden states of this rank, ``[sequence, batch, hidden]``, detached.
        rows: those that were projected: the same ones, or all ranks' under sequence parallelism.
        key, weights: the indexer's, ``[rows, batch, ...]``.
        with_graph: whether backward can reach the indexer's weights.
    """

    states: Tensor
    rows: Tensor
    key: Tensor
    weights: Tensor
    with_graph: bool

    @property
    def is_gathered(self) -> bool:
        """Return whether the rows are those of all tensor parallel ranks."""
        return self.rows is not self.states


_projected: WeakKeyDictionary[Any, Projected] = WeakKeyDictionary()
"""By indexer, from an attention's first step to the indexer's own."""


def put_projected(indexer: Any, projected: Projected) -> None:
    """Leave products of one forward for an indexer, which finds them when its turn comes."""
    _projected[indexer] = projected


def take_projected(indexer: Any, x: Tensor) -> Projected | None:
    """Return the products of these hidden states, once; ``None`` where the indexer has to project.

    Args:
        indexer: Megatron's ``DSAIndexer``.
        x: what it is given, ``[sequence, batch, hidden]``.
    """
    projected = _projected.pop(indexer, None)
    if projected is None or not _are_same(x, projected.states):
        return None
    # In the warm-up stage layers run without a graph, and their indexers with one.
    return None if torch.is_grad_enabled() and not projected.with_graph else projected


def view_with_projected(indexer: Any, projected: Projected) -> AttributeOverride:
    """Return the indexer with the products in place of the two projections."""
    return AttributeOverride(
        indexer,
        linear_wk=Function(lambda _: (projected.key, None)),
        linear_weights_proj=Function(lambda _: (projected.weights, None)),
    )


def _are_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
