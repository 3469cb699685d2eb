"""Second device stream, for work that does not depend on the latest work of the first stream.

Backward needs little extra code: autograd runs a node on the stream of its forward, and makes streams wait
for each other's gradients. Weight gradients are the exception, because no stream waits for a gradient that a
hook later reads from the parameter. Their ``AccumulateGrad`` nodes are therefore created on the first stream,
and autograd makes the first stream wait for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mindspeed_dsa import platforms
from mindspeed_dsa.megatron.attribute_override import AttributeOverride, Function
from mindspeed_dsa.megatron.gathered_weights import wait_for_all_weights
from mindspeed_dsa.megatron.two_streams import LEAST_TOKENS, Streams


def second() -> Any:
    """Return the second stream, which all layers share."""
    return platforms.current().second_stream


def is_worth(streams: Streams, states: Tensor) -> bool:
    """Return whether work on hidden states ``[sequence, batch, hidden]`` should use the second stream."""
    # On a CPU there is nothing to wait for, so every size does.
    platform, least = platforms.current(), streams.least_tokens
    if least is None:
        least = LEAST_TOKENS.get(platform.name, 0)
    large = states[..., 0].numel() >= least  # sequence * batch tokens
    return streams.second and (large or not platform.asynchronous)


def keep_for(stream: Any, tensors: Iterable[Tensor]) -> None:
    """Call ``record_stream``: keep the tensors' memory until another stream's work on it is done."""
    platform = platforms.current()
    for tensor in tensors:
        if tensor.device.type == platform.device_type:
            platform.record_stream(tensor, stream)


class Started:
    """Handle of tensors that are being computed on the second stream."""

    def __init__(self, tensors: tuple[Tensor, ...], done: Any) -> None:
        self._tensors, self._done = tensors, done

    def wait(self) -> tuple[Tensor, ...]:
        """Make the current stream wait for the tensors, and return them."""
        stream = platforms.current().current_stream()
        stream.wait_event(self._done)
        keep_for(stream, self._tensors)
        return self._tensors


def start(compute: Callable[[], tuple[Tensor, ...]], states: Tensor, *modules: nn.Module) -> Started:
    """Run ``compute`` on the second stream, after all work submitted to the current stream so far.

    Args:
        compute: function that reads only ``states``, the modules' weights, and data older than this step.
        states: input tensor, computed on the current stream.
        modules: modules whose weights may still be gathered for the current stream.
    """
    for module in modules:
        wait_for_all_weights(module)
    # Created on the current stream and held until compute() has built its graph; otherwise compute() would
    # create them on the second stream.
    held = _accumulators(modules)
    platform = platforms.current()
    stream = second()
    ready, done = platform.new_event(), platform.new_event()
    ready.record()
    # Wait for the current stream's work so far, but not for later work.
    stream.wait_event(ready)
    with platform.use_stream(stream):
        tensors = compute()
        done.record()
    del held  # the graph that compute() built holds the nodes now
    # The second stream reads `states`, which the current stream allocated.
    keep_for(stream, [states])
    return Started(tensors, done)


def _accumulators(modules: Iterable[nn.Module]) -> list[Any]:
    """Create the weights' ``AccumulateGrad`` nodes on the current stream, unless they exist."""
    if not torch.is_grad_enabled():
        return []
    return [
        torch.autograd.graph.get_gradient_edge(weight).node
        for module in modules
        for weight in module.parameters()
        if weight.requires_grad
    ]


def gathers_for_itself(module: nn.Module) -> bool:
    """Return whether this module or a submodule is an FSDP2 unit, which gathers its weights when called."""
    # It does so on the stream of the call, and does not know that another stream reads the weights.
    return any(hasattr(submodule, "_get_fsdp_state") for submodule in module.modules())


# -- projections of hidden states that an indexer finds already computed -----------------------------


class Projected(NamedTuple):
    """Indexer projections of one forward, computed in advance.

    Attributes:
        states: hidden states of this rank, ``[sequence, batch, hidden]``, detached.
        rows: hidden states that were projected: ``states``, or under sequence parallelism the hidden states
            gathered from all tensor parallel ranks.
        key, weights: indexer's key and head weights, ``[rows, batch, ...]``.
        with_graph: whether backward can reach the indexer's weights.
    """

    states: Tensor
    rows: Tensor
    key: Tensor
    weights: Tensor
    with_graph: bool

    @property
    def is_gathered(self) -> bool:
        """Whether tokens of all tensor parallel ranks were projected."""
        return self.rows is not self.states


_PROJECTED = "_mindspeed_dsa_projected"
"""Attribute of an indexer that stores projections until the indexer's forward takes them."""


def put_projected(indexer: Any, projected: Projected) -> None:
    """Store a forward's projections on the indexer until :func:`take_projected` removes them."""
    vars(indexer)[_PROJECTED] = projected


def take_projected(indexer: Any, x: Tensor) -> Projected | None:
    """Remove and return the projections stored for ``x``, or ``None`` if the indexer must compute them.

    Args:
        indexer: Megatron's ``DSAIndexer``.
        x: indexer's input, ``[sequence, batch, hidden]``.
    """
    projected = vars(indexer).pop(_PROJECTED, None)
    if projected is None or not _are_same(x, projected.states):
        return None
    # In the warm-up stage layers run without a graph, but their indexers with one.
    return None if torch.is_grad_enabled() and not projected.with_graph else projected


def view_with_projected(indexer: Any, projected: Projected) -> AttributeOverride:
    """Return a view of the indexer that uses the projections instead of its two linear layers."""
    return AttributeOverride(
        indexer,
        linear_wk=Function(lambda _: (projected.key, None)),
        linear_weights_proj=Function(lambda _: (projected.weights, None)),
    )


def _are_same(one: Tensor, other: Tensor) -> bool:
    # `states` is detached from the indexer's input, so compare storage instead of identity.
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
