"""Gathering the model's weights bucket by bucket while the rest of a step is under way.

Megatron gathers all buckets after the step. Here each bucket group is gathered, on a stream of its own, as
soon as the chunks that hold this rank's part of it are updated; Megatron's own call then finds it done.
Ranks have different parts of parameters, so their chunks differ; they agree on the order of bucket groups,
also those that have no part at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.features.memory.swap_optimizer.step_pipeline import Chunk
from mindspeed_dsa.platforms.base import Event

_GATHERED = "_mindspeed_dsa_gathered"


class BucketOrder:
    """Bucket groups of a ``DistributedOptimizer`` in the order in which Megatron gathers them.

    Args:
        optimizer: Megatron's.
    """

    def __init__(self, optimizer: Any) -> None:
        own_buckets = {id(bucket) for buffer in optimizer.buffers for bucket in buffer.buckets}
        self.groups = [
            group
            for chunk in optimizer.model_chunks
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            if group.buckets and id(group.buckets[0]) in own_buckets
        ]
        self._positions = {
            id(bucket): position for position, group in enumerate(self.groups) for bucket in group.buckets
        }
        self._optimizer = optimizer

    def position(self, model: Tensor) -> int:
        """Return the number of the group that gathers one of the model's parameters."""
        number, _, place = self._optimizer.model_param_gbuf_map[model]
        return self._positions[id(self._optimizer.buffers[number].buckets[place])]


class EarlyGather:
    """Gathers of one optimizer's steps.

    Args:
        groups: bucket groups, in order.
        chunks: of a step; none on a rank that has nothing to update.
    """

    def __init__(self, groups: Sequence[Any], chunks: Sequence[Chunk]) -> None:
        self._groups = list(groups)
        self._last = [-1] * len(groups)  # chunk that a group waits for
        for number, chunk in enumerate(chunks):
            for piece in chunk.pieces:
                self._last[piece.parameter.position] = number
        self._stream = platforms.current().new_stream()
        self._done = 0

    @contextmanager
    def during_a_step(self) -> Iterator[Callable[[int, Event], None]]:
        """Yield a function to call with each chunk's number and the event that its update is recorded in."""
        self._done = 0
        try:
            yield self._updated
        except BaseException:
            for group in self._groups:  # nothing was gathered that a later step could rely on
                vars(group).pop(_GATHERED, None)
            raise
        platforms.current().current_stream().wait_stream(self._stream)

    @contextmanager
    def with_nothing_to_update(self) -> Iterator[None]:
        """Gather in a step on a rank that has no part of the buckets, in the order of the others."""
        with self.during_a_step() as updated:
            event = platforms.current().new_event()
            event.record(platforms.current().current_stream())
            updated(0, event)
            yield

    def _updated(self, number: int, event: Event) -> None:
        with platforms.current().use_stream(self._stream):
            while self._done < len(self._groups) and self._last[self._done] <= number:
                self._stream.wait_event(event)
                group = self._groups[self._done]
                group.start_param_sync()
                setattr(group, _GATHERED, True)
                self._done += 1


def unless_gathered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``_ParamAndGradBucketGroup.start_param_sync``."""

    def start_param_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not vars(self).pop(_GATHERED, False):
            return original(self, *args, **kwargs)
        return None

    return start_param_sync
