"""Worker functions: pairs with permutations on the second stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from mindspeed_dsa.megatron import second_stream
from tests.features.pipeline.fb_overlap import paired_steps
from tests.support import model
from tests.support.stream_order import OrderedPlatform, OrderedStream, as_on_a_device, watched

SWITCHES = {"moe_fb_overlap": True, "two_streams": True, "two_streams_min_tokens": 0}


def trained(**arguments: Any) -> dict[str, Any]:
    """Take a step of :func:`paired_steps.trained`; also return the number of node runs per stream."""
    with _nodes() as nodes:
        result = paired_steps.trained(**arguments)
    return {**result, "nodes": dict(nodes)}


@contextmanager
def _nodes() -> Iterator[Counter[str]]:
    """Count nodes by direction, name and stream."""
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    counts: Counter[str] = Counter()

    def counting(direction: str) -> Any:
        original = getattr(ScheduleNode, direction)

        def run(self: Any, *args: Any) -> Any:
            stream = "second" if self.stream is second_stream.second() else "first"
            counts[f"{direction} {self.name} {stream}"] += 1
            return original(self, *args)

        return mock.patch.object(ScheduleNode, direction, run)

    with counting("forward"), counting("backward"):
        yield counts


def races(
    dropped: Mapping[str, int] | None = None,
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    forgets: bool = False,
) -> dict[str, Any]:
    """Return the races in two microbatches through two layers, and each stream's number of waits.

    Args:
        dropped: dict from a stream, ``first`` or ``second``, to the number of its event wait to omit.
        switches: further feature switches.
        overrides: config fields that differ from the model's.
        forgets: whether the allocator is not informed of memory that crosses streams.
    """
    model.start({**SWITCHES, **(switches or {})}, ep=2, etp=1)
    cfg = model.config(**{"moe_layer_freq": [1, 1], "expert_model_parallel_size": 2, **(overrides or {})})
    chunk = model.gpt_model(cfg)
    waits: Counter[str] = Counter()
    with watched(results=True) as platform, as_on_a_device(platform):
        keep = mock.patch.object(second_stream, "keep_for", _tell_nobody)
        with _dropping(dropped or {}, platform, waits), keep if forgets else nullcontext():
            model.train_step(cfg, [chunk], list(model.samples(2).view(2, 1, -1)))
    return {
        "races": platform.races,
        "waits": dict(waits),
        "freed early": list(platform.freed_early),
    }


def _tell_nobody(stream: Any, tensors: Any) -> None:
    """Replace ``keep_for``; a mock would hold the tensors."""


def _dropping(dropped: Mapping[str, int], platform: OrderedPlatform, waits: Counter[str]) -> Any:
    wait: Callable[..., None] = OrderedStream.wait_event

    def wait_unless_dropped(self: OrderedStream, event: Any) -> None:
        name = "first" if self is platform.host else "second" if self is second_stream.second() else "other"
        # Only waits for clocks ahead of this stream's count.
        if any(self.clock[stream] < time for stream, time in event.clock.items() if stream is not self):
            waits[name] += 1
            if dropped.get(name) == waits[name]:
                return
        wait(self, event)

    return mock.patch.object(OrderedStream, "wait_event", wait_unless_dropped)
