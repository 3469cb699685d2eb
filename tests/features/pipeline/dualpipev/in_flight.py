"""Worker functions: counts of chunk forwards with live activations in a training step.

A forward is alive as long as any tensor that it made and saved for backward is alive, in the graph or with
deferred weight gradients. Not counted: tensors that outlive the step (weights), a forward's input and
indices, because Megatron's modules keep the last ones, and the job's loss mask.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any
from unittest import mock

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_dsa.features.pipeline.dualpipev.step import _Step
from mindspeed_dsa.schedule.events import Kind, Schedule
from tests.support import model

Counts = list[tuple[str, int]]
"""Per block, except deferred weight gradients: kinds of its events, and the number of live forwards before
it.
"""


def run(**arguments: Any) -> dict[str, Any]:
    """Run :func:`model.run`; also return this rank's ``counts``, the maximum of live forwards, ``most``, and
    ``steps_left``, the steps that only the garbage collector would free.
    """
    live = _Live()
    train_step = model.train_step

    def watched(*args: Any) -> Any:
        with live.watching():
            return train_step(*args)

    gc.collect()
    gc.disable()  # as with --manual-gc
    try:
        with mock.patch.object(model, "train_step", watched):
            result = model.run(**arguments)
        steps_left = sum(isinstance(each, _Step) for each in gc.get_objects())
    finally:
        gc.enable()
    return {**result, "counts": live.counts(), "most": live.most(), "steps_left": steps_left}


def listed(schedule: Schedule, rank: int) -> Counts:
    """Return the expected counts of a rank, by its list of events."""
    # Forwards whose weight gradients have an event of their own; they end at that event.
    later = {(e.chunk, e.microbatch) for e in schedule.ranks[rank] if e.kind is Kind.WEIGHT}
    now, counts = 0, []
    for block in schedule.blocks(rank):
        if block[0].kind is not Kind.WEIGHT:
            counts.append(("".join(event.kind.value for event in block), now))
        for event in block:
            waits = event.kind is Kind.BACKWARD and (event.chunk, event.microbatch) in later
            now += 1 if event.kind is Kind.FORWARD else 0 if waits else -1
    return counts


class _Live:
    """Storages saved by each forward, in order, and the live ones at each look."""

    def __init__(self) -> None:
        self._saved: list[list[StorageWeakRef]] = []
        self._looks: list[tuple[str, list[set[int]]]] = []
        self._block = ""
        self._input: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the storages that a step's forwards save, and the live ones before each block."""
        schedules, combined = (
            import_module(f"megatron.core.pipeline_parallel.{name}")
            for name in ("schedules", "combined_1f1b")
        )
        with (
            saved_tensors_hooks(self._pack, lambda kept: kept),
            self._noted(schedules, "forward_step", lambda **_: "F"),
            self._noted(schedules, "backward_step", lambda **_: "B"),
            self._noted(combined, "combined_forward_backward_step", _kinds),
            mock.patch.object(model, "loss_of", self._apart(model.loss_of)),
        ):
            yield
        # Storages that outlive the step are weights.
        outlive = self._alive()
        for _, alive in self._looks:
            for forward, persisting in zip(alive, outlive, strict=False):
                forward -= persisting

    def _noted(self, module: Any, name: str, kinds: Callable[..., str]) -> Any:
        original = getattr(module, name)
        parameters = signature(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._block:  # a nested call
                return original(*args, **kwargs)
            bound = parameters.bind(*args, **kwargs).arguments
            self._block, entered = kinds(**bound), bound.get("input_tensor")
            self._input = None if entered is None else entered.untyped_storage()._cdata
            self._looks.append((self._block, self._alive()))
            if "F" in self._block:
                self._saved.append([])
            try:
                return original(*args, **kwargs)
            finally:
                self._block = ""

        return mock.patch.object(module, name, call)

    def _apart(self, loss_function: Callable[..., Any]) -> Callable[..., Any]:
        def loss_of(*args: Any) -> Any:
            with saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
                return loss_function(*args)

        return loss_of

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if "F" in self._block and tensor.is_floating_point() and storage._cdata != self._input:
            self._saved[-1].append(StorageWeakRef(storage))
            # Another look once the first tensor of a forward is saved, for the maximum.
            if len(self._saved[-1]) == 1:
                self._looks.append(("", self._alive()))
        return tensor

    def _alive(self) -> list[set[int]]:
        return [{index for index, each in enumerate(refs) if not each.expired()} for refs in self._saved]

    def counts(self) -> Counts:
        """Return the number of live forwards before each block."""
        return [(events, sum(map(bool, alive))) for events, alive in self._looks if events]

    def most(self) -> int:
        """Return the maximum number of live forwards."""
        return max(sum(map(bool, alive)) for _, alive in self._looks)


def _kinds(f_model: Any, b_model: Any, **_: Any) -> str:
    return "F" * (f_model is not None) + "B" * (b_model is not None)
