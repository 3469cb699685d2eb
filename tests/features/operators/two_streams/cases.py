"""Steps of the tiny model on two streams, and one layer watched; runs in the pool's workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from tests.support import memory_events, model
from tests.support.stream_order import OrderedPlatform, OrderedStream, watched

ON = {"two_streams": True}


def step(**arguments: Any) -> dict[str, Any]:
    """A step as :func:`model.run` makes it, and how often something was started on the second stream."""
    with memory_events.counted() as counts:
        result = model.run(num_microbatches=2, **arguments)
    return {**result, "starts": counts[memory_events.BESIDE]}


def watched_layer(dropped: Sequence[int | None]) -> list[dict[str, Any]]:
    """Races in a layer's forward and backward, each time without one of the waits for events.

    Args:
        dropped: which wait is left out, in the order of a forward; ``None``: none is.
    """
    model.start(ON)
    layer = model.gpt_model(model.config()).train().decoder.layers[-1]
    return [_watch(layer, number) for number in dropped]


def _watch(layer: Any, dropped: int | None) -> dict[str, Any]:
    wait, keep = OrderedStream.wait_event, OrderedPlatform.record_stream
    waits: list[OrderedStream] = []
    kept: list[tuple[int, bool]] = []

    def wait_unless_dropped(self: OrderedStream, event: Any) -> None:
        waits.append(self)
        if len(waits) - 1 != dropped:
            wait(self, event)

    def keep_and_note(self: OrderedPlatform, tensor: torch.Tensor, stream: Any) -> None:
        kept.append((tensor.size(-1), stream is self.host))
        keep(self, tensor, stream)

    with (
        mock.patch.object(OrderedStream, "wait_event", wait_unless_dropped),
        mock.patch.object(OrderedPlatform, "record_stream", keep_and_note),
        watched(results=True) as platform,
    ):
        hidden = torch.randn(model.SEQUENCE, 2, 32, generator=torch.Generator().manual_seed(1))
        output, _ = layer(hidden.requires_grad_(), attention_mask=None)
        output.backward(torch.ones_like(output))
    return {"races": platform.races, "waits": len(waits), "kept": kept}
