"""Token permutation and unpermutation of paired layers on a second stream.

Permutations use vector cores and memory bandwidth; attention and experts use matrix cores. With
``--two-streams``, the permutations of the forward run during matmuls of the backward, and the reverse::

    second stream                                  first stream
    B  unpermutation; starts the combine           F  attention, router
    F  permutation; starts the dispatch            B  shared expert, experts
    B  permutation, behind the dispatch            F  shared expert, experts
    F  unpermutation, behind the combine           B  router, attention

The host issues work in the same order as with one stream. Megatron's CUDA event, shared by the nodes of a
microbatch, orders the nodes across streams. Forward and backward are of different microbatches, so they need
no order between them. A transfer is started and waited for on the stream of its node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from mindspeed_dsa.features.pipeline.fb_overlap.feature import Options
from mindspeed_dsa.features.pipeline.fb_overlap.pieces import Handover
from mindspeed_dsa.megatron import second_stream
from mindspeed_dsa.megatron.two_streams import Streams

Step = Callable[..., Any]
"""Forward function of a node; takes the node and its inputs."""


class Nodes:
    """Schedule nodes of one layer that only permute or unpermute tokens.

    Args:
        dispatcher: the layer's dispatcher, which stores tensors between its methods.
        first: stream of all other nodes (the main stream).
        nodes: permutation node, and unpermutation node unless its output must stay on the main stream.
        streams: configuration of the second stream.
    """

    def __init__(self, dispatcher: Any, first: Any, nodes: Sequence[Any], streams: Streams) -> None:
        self._first, self._nodes, self._streams = first, nodes, streams
        for node in nodes:
            node.submodule = _handing_over(node.submodule, dispatcher, first)

    def choose_stream(self, hidden: Tensor) -> None:
        """Select the nodes' stream by the size of ``hidden``, ``[sequence, batch, hidden]``."""
        stream = second_stream.second() if second_stream.is_worth(self._streams, hidden) else self._first
        for node in self._nodes:
            node.stream = stream


def _handing_over(step: Step, dispatcher: Any, first: Any) -> Step:
    """Wrap a step to call ``record_stream`` on tensors that both streams use."""

    def on_either_stream(node: Any, *inputs: Any) -> Any:
        if node.stream is first:
            return step(node, *inputs)
        # The step also reads tensors kept in the layer state and the dispatcher, and leaves some there for
        # later nodes on the first stream.
        second_stream.keep_for(node.stream, [*inputs, *_kept(node, dispatcher)])
        outputs = step(node, *inputs)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        second_stream.keep_for(first, [*several, *_kept(node, dispatcher)])
        return outputs

    return on_either_stream


def _kept(node: Any, dispatcher: Any) -> list[Tensor]:
    return [
        value
        for holder in (node.layer_state, dispatcher)
        for value in vars(holder).values()
        if isinstance(value, Tensor)
    ]


def serves(layer: Any, options: Options) -> bool:
    """Return whether a layer's permutation runs as a separate node."""
    # Moved experts are planned in the permutation and sent after the dispatch starts. Latent rows are
    # projected by a weight in the same step. Both keep the permutation in the router's node.
    latent = getattr(layer.mlp.config, "moe_latent_size", None)
    return options.streams.second and not options.moves_experts and not latent


@contextlib.contextmanager
def postponed(moe: Any, handover: Handover) -> Iterator[None]:
    """Context in which a ``MoELayer`` does not permute its hidden states and probabilities."""

    def preprocess(hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        handover.routing_map = routing_map
        return hidden, probs

    moe.preprocess = preprocess
    try:
        yield
    finally:
        del moe.preprocess


def permute(moe: Any, dispatch: Step, handover: Handover) -> Step:
    """Build the step that does the permutation skipped in :func:`postponed`, and starts the dispatch."""

    def step(node: Any, hidden: Tensor, probs: Tensor) -> Tensor:
        routing_map, handover.routing_map = handover.routing_map, None
        tokens, probs = moe.preprocess(hidden, probs, routing_map)
        edge: Tensor = dispatch(node, tokens, probs)
        return edge

    return step
