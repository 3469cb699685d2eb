"""Work on a second stream, and what it takes to use its results on the first.

Backward needs nothing of its own: autograd runs a node on the stream of its forward, and makes streams wait
for each other's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.megatron.gathered_weights import wait_for_all_weights

_streams: WeakKeyDictionary[platforms.Platform, Any] = WeakKeyDictionary()
"""One for all layers."""


class Started:
    """Tensors that the second stream computes."""

    def __init__(self, tensors: tuple[Tensor, ...], done: Any) -> None:
        self._tensors, self._done = tensors, done

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, for work on the current stream from here on."""
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
    """Where there is one stream, say so: the flag is for other machines then."""
    platform = platforms.current()
    if not platform.asynchronous:
        context.log.info(
            "--two-streams: %s has one stream, so everything runs in turns", platform.name, once=True
        )
