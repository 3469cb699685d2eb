"""Weight gradients that a pipeline's backwards leave uncomputed, by chunk and microbatch.

A schedule with a split backward computes gradients of inputs first, which other ranks wait for, and those of
weights where it has time::

    waiting = WaitingGradients(chunks, microbatches, megatron)
    with waiting.step():                          # around all of a training step's forwards and backwards
        with waiting.deferring(chunk, microbatch):
            ...                                   # the forward
        ...                                       # its backward
        waiting.ran_backward(chunk)
        waiting.run(chunk, microbatch)            # any time later: once for every chunk and microbatch

A weight gets its gradient through autograd, so that all hooks of data parallelism see it, and once for each
microbatch as without a split. Left out are weights of embeddings, norms, routers and biases, and all that no
linear layer asks :func:`~mindspeed_dsa.parallel.weight_gradients.deferred_gradient_of` for: these get theirs
in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.megatron import gathered_weights, pipeline_steps
from mindspeed_dsa.parallel.weight_gradients import DeferredGradient, Queued, queue_gradients
from mindspeed_dsa.schedule.events import Event, Kind

Unit = tuple[int, int]
"""Chunk and microbatch."""


class WaitingGradients:
    """Store of one training step.

    Args:
        chunks: this rank's model chunks, as the schedule gets them.
        microbatches: of the step.
        megatron: of the session.

    Attributes:
        most_bytes: largest memory of operands that waited between two of a step's events.
        most_units: most pairs of chunk and microbatch whose gradients waited at one time.
    """

    def __init__(self, chunks: Sequence[Any], microbatches: int, megatron: Megatron) -> None:
        self._chunks, self._config = chunks, megatron("core.utils").get_model_config(chunks[0])
        self._weights = [list(_weights(chunk, megatron)) for chunk in chunks]
        self._queues: dict[Unit, list[Queued]] = {}
        self._left = [microbatches for _ in chunks]
        self._reductions = [_Reduction() for _ in chunks]
        self.most_bytes = self.most_units = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surround a step: chunks are reduced when the last of their gradients is there.

        Whatever waits still runs before Megatron finalizes the gradients.
        """
        config = self._config
        names = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")
        given = {name: getattr(config, name) for name in names}
        config.no_sync_func = self._no_sync(given["no_sync_func"])
        config.grad_sync_func = self._reduce_later(given["grad_sync_func"])
        config.finalize_model_grads_func = self._run_before(given["finalize_model_grads_func"])
        try:
            yield
            self.run_all()
        finally:
            self._queues.clear()  # of a step that failed
            for name, value in given.items():
                setattr(config, name, value)

    def deferring(self, chunk: int, microbatch: int) -> AbstractContextManager[Any]:
        """Have linear layers that are called in the block leave their weights' gradients here."""
        queue = self._queues.setdefault((chunk, microbatch), [])
        return queue_gradients(self._weights[chunk], queue)

    def ran_backward(self, chunk: int) -> None:
        """Note that one of a chunk's backwards is done."""
        self._reductions[chunk].in_backward()
        waiting = [queue for queue in self._queues.values() if queue]
        self.most_units = max(self.most_units, len(waiting))
        self.most_bytes = max(self.most_bytes, _bytes(each for queue in waiting for each in queue))

    def run(self, chunk: int, microbatch: int) -> None:
        """Compute the weight gradients of one backward; nothing is done a second time.

        Args:
            chunk: of the backward.
            microbatch: of it.
        """
        queue = self._queues.pop((chunk, microbatch), None)
        if queue is None:
            return
        reduction, last = self._reductions[chunk], self._is_last(chunk)
        event = pipeline_steps.noted(Event(Kind.WEIGHT, chunk, microbatch))
        with event, reduction.reducing(last):
            give(queue)
            gathered_weights.reduce_late_gradients(self._chunks[chunk])
        if last:
            reduction.all_there()

    def left_nothing(self, chunk: int) -> None:
        """Note that one of a chunk's backwards, whose forward was not :meth:`deferring`, has computed all."""
        if self._is_last(chunk):
            self._reductions[chunk].all_there()

    def _is_last(self, chunk: int) -> bool:
        self._left[chunk] -= 1
        return self._left[chunk] == 0

    def run_all(self) -> None:
        """Compute all weight gradients that wait, in the order of their forwards."""
        for unit in list(self._queues):
            self.run(*unit)

    # -- reduction over data parallel ranks --------------------------------------------------------

    def _no_sync(self, given: Any) -> Any:
        """Wrap a configuration's ``no_sync_func``: one for all chunks, or a list."""
        if given is None:
            return None
        if not isinstance(given, list):
            shared = _NoSync(given)
            for reduction in self._reductions:
                reduction.no_sync = shared
            return shared
        for reduction, function in zip(self._reductions, given, strict=True):
            reduction.no_sync = _NoSync(function)
        return [reduction.no_sync for reduction in self._reductions]

    def _reduce_later(self, given: Any) -> Any:
        """Wrap a configuration's ``grad_sync_func`` likewise."""
        if given is None:
            return None
        functions = given if isinstance(given, list) else [given for _ in self._reductions]
        wrapped = [self._later(*each) for each in enumerate(functions)]
        return wrapped if isinstance(given, list) or len(wrapped) > 1 else wrapped[0]

    def _later(self, chunk: int, function: Callable[..., Any]) -> Callable[..., None]:
        reduction = self._reductions[chunk]

        def grad_sync(*args: Any) -> None:
            reduction.start = partial(function, *args)
            if self._left[chunk] == 0:
                reduction.all_there()

        return grad_sync

    def _run_before(self, given: Any) -> Any:
        """Wrap a configuration's ``finalize_model_grads_func``."""
        if given is None:
            return None

        def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
            self.run_all()
            return given(*args, **kwargs)

        return finalize_model_grads


class _NoSync:
    """Megatron's ``no_sync`` of a chunk, which can be left and entered again."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: AbstractContextManager[Any] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Keep gradients from being reduced, as the schedule asks for."""
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    @property
    def is_on(self) -> bool:
        """Return whether gradients are kept from being reduced now."""
        return self._entered is not None

    @contextlib.contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Keep gradients from being reduced in the block, or let them."""
        before = self.is_on
        self._switch(on)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, on: bool) -> None:
        if on == self.is_on:
            return
        if on:
            self._entered = self._make()
            self._entered.__enter__()
        else:
            entered, self._entered = self._entered, None
            assert entered is not None
            entered.__exit__(None, None, None)


class _Reduction:
    """When a chunk's gradients are reduced, under ``--overlap-grad-reduce``.

    Gradients are reduced as soon as they are there if the schedule lets those of the chunk's last backward be
    reduced so; else where it starts the reduction, or, if some are to come then, after the last.

    Attributes:
        no_sync: keeps the chunk's gradients from being reduced; ``None``: they are reduced at the end.
        start: what the schedule wants to start, once all gradients are there.
    """

    def __init__(self) -> None:
        self.no_sync: _NoSync | None = None
        self.start: Callable[[], Any] | None = None
        self._at_once = False

    def in_backward(self) -> None:
        """Note whether the schedule lets a backward's gradients be reduced."""
        self._at_once = self._at_once or (self.no_sync is not None and not self.no_sync.is_on)

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """Surround gradients of one microbatch."""
        if self.no_sync is None:
            return contextlib.nullcontext()
        return self.no_sync.switched(not (last and self._at_once))

    def all_there(self) -> None:
        """Start what has been asked for."""
        start, self.start = self.start, None
        if start is not None:
            start()


def _weights(chunk: Any, megatron: Megatron) -> Iterator[Tensor]:
    """Yield matrices that learn, without those that an embedding reads, whose gradients are of two kinds."""
    embedding = megatron("core.tensor_parallel.layers").VocabParallelEmbedding
    apart = {id(each.weight) for each in chunk.modules() if isinstance(each, embedding)}
    for weight in chunk.parameters():
        if weight.requires_grad and weight.dim() > 1 and id(weight) not in apart:
            yield weight


def give(queue: list[Queued]) -> None:
    """Compute gradients and hand them to autograd, weight by weight; operands go as soon as each is done."""
    while queue:
        with torch.enable_grad():
            late = _taken_out(queue)
        torch.autograd.backward(late.edge, late.edge.new_empty(0))


def _taken_out(queue: list[Queued]) -> DeferredGradient:
    """Return the gradients of the first weight, of all its uses."""
    weight = queue[0].weight
    late = DeferredGradient(weight)
    for each in [each for each in queue if each.weight is weight]:
        late.defer(each.gradient)
    queue[:] = [each for each in queue if each.weight is not weight]
    return late


def _bytes(queued: Iterable[Queued]) -> int:
    """Return the memory of all operands, each storage once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for each in queued
        for operand in each.operands
        if (storage := operand.untyped_storage()).nbytes()
    }
    return sum(storages.values())
