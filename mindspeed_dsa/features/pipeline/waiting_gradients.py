"""Deferred weight gradients of a pipeline schedule, by chunk and microbatch.

A split backward first computes only input gradients, because other ranks wait for them. The schedule computes
the weight gradients later, when the rank would idle::

    waiting = WaitingGradients(chunks, microbatches, megatron)
    with waiting.step():                          # around all of a training step's forwards and backwards
        with waiting.deferring(chunk, microbatch):
            ...                                   # the forward
        ...                                       # its backward
        waiting.ran_backward(chunk)
        waiting.run(chunk, microbatch)            # any time later: once for every chunk and microbatch

A weight still gets its gradient through autograd, once per microbatch, so that the data parallel hooks run.
Not deferred are the gradients of embeddings, norms, routers and biases, and of layers that do not call
:func:`~mindspeed_dsa.parallel.weight_gradients.deferred_gradient_of`.
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
    """Deferred weight gradients of one training step.

    Args:
        chunks: this rank's model chunks, as passed to the schedule.
        microbatches: number of microbatches of the step.
        megatron: the session's accessor of Megatron's modules.

    Attributes:
        most_bytes: peak memory of the operands of deferred gradients, in bytes.
        most_units: peak number of backwards with deferred gradients.
    """

    def __init__(self, chunks: Sequence[Any], microbatches: int, megatron: Megatron) -> None:
        self._chunks, self._config = chunks, megatron("core.utils").get_model_config(chunks[0])
        self._weights = [list(_weights(chunk, megatron)) for chunk in chunks]
        self._queues: dict[Unit, list[Queued]] = {}
        # Backwards per chunk whose weight gradients are still to be computed.
        self._left = [microbatches for _ in chunks]
        self._reductions = [_Reduction() for _ in chunks]
        self.most_bytes = self.most_units = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context around a step: postpone each chunk's gradient reduction until its last weight gradient.

        Gradients that are still deferred at the end are computed before ``finalize_model_grads_func``.
        """
        config = self._config
        names = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")
        functions = {name: getattr(config, name) for name in names}
        config.no_sync_func = self._no_sync(functions["no_sync_func"])
        config.grad_sync_func = self._reduce_later(functions["grad_sync_func"])
        config.finalize_model_grads_func = self._run_before(functions["finalize_model_grads_func"])
        try:
            yield
            self.run_all()
        finally:
            self._queues.clear()  # only a failed step leaves any
            for name, value in functions.items():
                setattr(config, name, value)

    def deferring(self, chunk: int, microbatch: int) -> AbstractContextManager[Any]:
        """Return a context that defers the weight gradients of linear layers called inside."""
        queue = self._queues.setdefault((chunk, microbatch), [])
        return queue_gradients(self._weights[chunk], queue)

    def ran_backward(self, chunk: int) -> None:
        """Record that a backward of the chunk has run; its weight gradients may be deferred."""
        self._reductions[chunk].in_backward()
        waiting = [queue for queue in self._queues.values() if queue]
        self.most_units = max(self.most_units, len(waiting))
        self.most_bytes = max(self.most_bytes, _bytes(entry for queue in waiting for entry in queue))

    def run(self, chunk: int, microbatch: int) -> None:
        """Compute the deferred weight gradients of one backward. Does nothing if they are computed already.

        Args:
            chunk: index of the backward's chunk.
            microbatch: index of the microbatch.
        """
        queue = self._queues.pop((chunk, microbatch), None)
        if queue is None:
            return
        reduction, last = self._reductions[chunk], self._is_last(chunk)
        event = pipeline_steps.noted(Event(Kind.WEIGHT, chunk, microbatch))
        with event, reduction.reducing(last):
            give(queue)
            # For weights whose reduction has run in backward, without these gradients.
            gathered_weights.reduce_late_gradients(self._chunks[chunk])
        if last:
            reduction.all_there()

    def left_nothing(self, chunk: int) -> None:
        """Record that a backward has no deferred weight gradients, because :meth:`deferring` was not used."""
        if self._is_last(chunk):
            self._reductions[chunk].all_there()

    def _is_last(self, chunk: int) -> bool:
        self._left[chunk] -= 1
        return self._left[chunk] == 0

    def run_all(self) -> None:
        """Compute all deferred weight gradients, in the order of their forwards."""
        for unit in list(self._queues):
            self.run(*unit)

    # -- reduction over data parallel ranks --------------------------------------------------------

    def _no_sync(self, sync: Any) -> Any:
        """Wrap ``no_sync_func`` (one for all chunks, or a list) by :class:`_NoSync`."""
        if sync is None:
            return None
        if not isinstance(sync, list):
            shared = _NoSync(sync)
            for reduction in self._reductions:
                reduction.no_sync = shared
            return shared
        for reduction, function in zip(self._reductions, sync, strict=True):
            reduction.no_sync = _NoSync(function)
        return [reduction.no_sync for reduction in self._reductions]

    def _reduce_later(self, sync: Any) -> Any:
        """Wrap ``grad_sync_func`` (one for all chunks, or a list) to wait for the chunk's last gradient."""
        if sync is None:
            return None
        functions = sync if isinstance(sync, list) else [sync for _ in self._reductions]
        wrapped = [self._later(*each) for each in enumerate(functions)]
        # Megatron wants a list if there are several chunks.
        return wrapped if isinstance(sync, list) or len(wrapped) > 1 else wrapped[0]

    def _later(self, chunk: int, function: Callable[..., Any]) -> Callable[..., None]:
        reduction = self._reductions[chunk]

        def grad_sync(*args: Any) -> None:
            # Postponed until the chunk's last gradient; queued gradients may still be missing.
            reduction.start = partial(function, *args)
            if self._left[chunk] == 0:
                reduction.all_there()

        return grad_sync

    def _run_before(self, finalize: Any) -> Any:
        """Wrap the configuration's ``finalize_model_grads_func``: compute deferred gradients first."""
        if finalize is None:
            return None

        def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
            self.run_all()
            return finalize(*args, **kwargs)

        return finalize_model_grads


class _NoSync:
    """Megatron's ``no_sync`` context of a chunk, which can be exited and entered again."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: AbstractContextManager[Any] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context used by the schedule: disable reduction."""
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    @property
    def is_on(self) -> bool:
        """Return whether reduction is disabled now."""
        return self._entered is not None

    @contextlib.contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Context that disables reduction (``on``), or enables it."""
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
    """Control of the point at which a chunk's gradients are reduced under ``--overlap-grad-reduce``.

    If the schedule leaves ``no_sync`` for the chunk's last backward, gradients of the last microbatch are
    reduced as they are computed. If the schedule calls ``grad_sync_func`` instead, the call is postponed
    until the chunk's last weight gradient is computed.

    Attributes:
        no_sync: context that disables the chunk's reduction. ``None``: gradients are reduced at the end of
            the step.
        start: postponed call of ``grad_sync_func``, or ``None``.
    """

    def __init__(self) -> None:
        self.no_sync: _NoSync | None = None
        self.start: Callable[[], Any] | None = None
        self._at_once = False

    def in_backward(self) -> None:
        """Record whether the schedule has reduction enabled in this backward."""
        self._at_once = self._at_once or (self.no_sync is not None and not self.no_sync.is_on)

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """Return a context manager in which one microbatch's weight gradients are computed.

        Gradient reduction is enabled inside if ``last`` and if the schedule enabled it in a backward, and
        disabled otherwise.
        """
        if self.no_sync is None:
            return contextlib.nullcontext()
        # Reduce only with the last microbatch, and only if the schedule allowed it in its backward.
        return self.no_sync.switched(not (last and self._at_once))

    def all_there(self) -> None:
        """Make the postponed ``grad_sync_func`` call, if any."""
        start, self.start = self.start, None
        if start is not None:
            start()


def _weights(chunk: Any, megatron: Megatron) -> Iterator[Tensor]:
    """Yield trained matrices except embeddings, whose gradients do not come from a matmul."""
    embedding = megatron("core.tensor_parallel.layers").VocabParallelEmbedding
    apart = {id(module.weight) for module in chunk.modules() if isinstance(module, embedding)}
    for weight in chunk.parameters():
        # Weights of norms, and biases, have one dimension.
        if weight.requires_grad and weight.dim() > 1 and id(weight) not in apart:
            yield weight


def give(queue: list[Queued]) -> None:
    """Compute the queued gradients one weight at a time through autograd, and free their operands."""
    while queue:
        with torch.enable_grad():
            late = _taken_out(queue)
        # Runs the weight's AccumulateGrad, and with it the hooks of data parallelism.
        torch.autograd.backward(late.edge, late.edge.new_empty(0))


def _taken_out(queue: list[Queued]) -> DeferredGradient:
    """Remove all entries of the first weight from the queue; return them as one deferred gradient."""
    weight = queue[0].weight
    late = DeferredGradient(weight)
    for entry in [entry for entry in queue if entry.weight is weight]:
        late.defer(entry.gradient)
    queue[:] = [entry for entry in queue if entry.weight is not weight]
    return late


def _bytes(queued: Iterable[Queued]) -> int:
    """Return the memory of all operands in bytes. Each storage counts once."""
    # Operands may be views of one storage.
    storages = {
        storage.data_ptr(): storage.nbytes()
        for entry in queued
        for operand in entry.operands
        if (storage := operand.untyped_storage()).nbytes()
    }
    return sum(storages.values())
