"""Permutation and unpermutation of a layer in pairs: rows are moved beside the other direction's matmuls.

Moving rows takes vector cores and memory, and attention and experts the matrix cores. With ``--two-streams``
these nodes run on the second stream, in forward and in backward::

    second stream                                  first stream
    B  unpermutation; starts the combine           F  attention, router
    F  permutation; starts the dispatch            B  shared expert, experts
    B  permutation, behind the dispatch            F  shared expert, experts
    F  unpermutation, behind the combine           B  router, attention

The host's order is the same as on one stream. Megatron's event, which the nodes of a microbatch share, orders
each direction for itself; between the directions there is nothing to order. A transfer is started and awaited
on the stream of its node.
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
"""A node's forward: it gets the node and its inputs."""


class Nodes:
    """Nodes of one layer's forward and backward that only move rows.

    Args:
        dispatcher: of the layer, which keeps tensors between its steps.
        first: the stream of all other nodes.
        nodes: of the permutation and of the unpermutation, or one of them.
        streams: of the session.
    """

    def __init__(self, dispatcher: Any, first: Any, nodes: Sequence[Any], streams: Streams) -> None:
        self._first, self._nodes, self._streams = first, nodes, streams
        for node in nodes:
            node.submodule = _handing_over(node.submodule, dispatcher, first)

    def choose_stream(self, hidden: Tensor) -> None:
        """Choose the nodes' stream for a forward, and its backward, of ``[sequence, batch, hidden]``."""
        stream = second_stream.second() if second_stream.is_worth(self._streams, hidden) else self._first
        for node in self._nodes:
            node.stream = stream


def _handing_over(step: Step, dispatcher: Any, first: Any) -> Step:
    """Keep memory that crosses the streams until both are done with it."""

    def on_either_stream(node: Any, *inputs: Any) -> Any:
        if node.stream is first:
            return step(node, *inputs)
        # What is kept beside the rows is read here, and what the step leaves there by later nodes.
        second_stream.keep_for(node.stream, [*inputs, *_kept(node, dispatcher)])
        outputs = step(node, *inputs)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        second_stream.keep_for(first, [*several, *_kept(node, dispatcher)])
        return outputs

    return on_either_stream


def _kept(node: Any, dispatcher: Any) -> list[Tensor]:
    return [
        each
        for holder in (node.layer_state, dispatcher)
        for each in vars(holder).values()
        if isinstance(each, Tensor)
    ]


def serves(layer: Any, options: Options) -> bool:
    """Return whether a layer's permutation is a node of its own.

    Hot experts are planned with the permutation and leave behind the dispatch: they stay with the router.
    Latent rows are projected in the same step, by weights.
    """
    latent = getattr(layer.mlp.config, "moe_latent_size", None)
    return options.streams.second and not options.moves_experts and not latent


@contextlib.contextmanager
def postponed(moe: Any, handover: Handover) -> Iterator[None]:
    """Have a ``MoELayer`` return hidden states and probabilities as they are, in place of permuted ones."""

    def preprocess(hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        handover.routing_map = routing_map
        return hidden, probs

    moe.preprocess = preprocess
    try:
        yield
    finally:
        del moe.preprocess


def permute(moe: Any, dispatch: Step, handover: Handover) -> Step:
    """Make the step that permutes what :func:`postponed` has left, and starts the dispatch."""

    def step(node: Any, hidden: Tensor, probs: Tensor) -> Tensor:
        routing_map, handover.routing_map = handover.routing_map, None
        tokens, probs = moe.preprocess(hidden, probs, routing_map)
        edge: Tensor = dispatch(node, tokens, probs)
        return edge

    return step
