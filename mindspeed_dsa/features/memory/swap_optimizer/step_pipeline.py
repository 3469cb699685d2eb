"""Optimizer step over chunks of state that lies on the host: load, update and store at the same time.

A *slab* is one buffer of float32 on the host, ``[rows, numel]``: the parameters of an optimizer one after the
other, in every row the same columns. Three rows are master weight, ``exp_avg`` and ``exp_avg_sq``; two are
the moments alone, where the model's own weight is float32. A *chunk* is a range of columns. Adam works
element by element, so a chunk may begin and end inside a parameter.

Three staging buffers go round. While Adam updates a chunk in one of them on the current stream, the next
chunk arrives in the second on a stream of its own, and the chunk before leaves the third on another.
The buffers are there from the first load, which may begin before the gradients are complete, to the end of
the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.features.memory.optimizer_memory import MOMENTS, Moments, is_torch_adam
from mindspeed_dsa.megatron.optimizer import StepIntegrity, Writes
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.platforms import host_pool
from mindspeed_dsa.platforms.base import Event, Stream

# -- state on the host ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Parameter:
    """Tensor that an optimizer updates.

    Attributes:
        main: the optimizer's own tensor, a key of its state. Its numbers are on the host, unless it is the
            model's float32 weight itself.
        group: number of its parameter group.
        weights: gives the model's weights that are made from it, ``[piece.numel()]``; ``None`` if ``main``
            is the model's weight.
        position: parameters are updated in this order; with sharding, that of the buckets they lie in.
    """

    main: Tensor
    group: int
    weights: Callable[[], Tensor] | None
    position: int = 0

    @property
    def piece(self) -> Tensor:
        """Return what this rank has of ``main``: all of it, unless it is sharded."""
        return local_of(self.main)

    @property
    def rows(self) -> int:
        """Return how many numbers are on the host for each of the parameter's."""
        return 2 if self.weights is None else 3


class Slab:
    """Float32 numbers of parameters that have equally many rows.

    Attributes:
        rows: ``[rows, numel]``, on the host; the moments are zero at first.
        starts: first column of each parameter.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = sorted(parameters, key=lambda each: each.position)
        count = self.parameters[0].rows
        self.starts: dict[Tensor, int] = {}
        numel = 0
        for each in self.parameters:
            self.starts[each.main] = numel
            numel += each.piece.numel()
        # A padding number: Megatron's writer assumes that a tensor which fills its storage is never changed.
        memory = host_pool.shared.keep(4 * (count * numel + 1), owner=self).view(torch.float32)
        self.rows = memory[:-1].view(count, numel)
        self.rows[-2:].zero_()

    def of(self, parameter: Parameter) -> tuple[Tensor, ...]:
        """Return the parameter's numbers on this rank, one tensor per row, shaped as they are there."""
        start, piece = self.starts[parameter.main], parameter.piece
        return tuple(row[start : start + piece.numel()].view(piece.shape) for row in self.rows)


@dataclass(frozen=True)
class Piece:
    """Part of a parameter that lies in a chunk: ``parameter[start:end]``, from ``column`` on."""

    parameter: Parameter
    start: int
    end: int
    column: int


@dataclass(frozen=True)
class Chunk:
    """Range of columns of a slab.

    Attributes:
        host: ``[rows, columns]``, a view of the slab.
        pieces: the parts of parameters inside, in order, without gaps.
    """

    host: Tensor
    pieces: tuple[Piece, ...]


def cut(slab: Slab, columns: int) -> list[Chunk]:
    """Cut a slab into chunks of ``columns`` columns, at least one; the last one takes what is left."""
    numel = slab.rows.size(1)
    return [
        Chunk(slab.rows[:, first:last], tuple(_pieces(slab, first, last)))
        for first, last in (
            (first, min(first + columns, numel)) for first in range(0, max(numel, 1), columns)
        )
    ]


def _pieces(slab: Slab, first: int, last: int) -> Iterator[Piece]:
    for parameter in slab.parameters:
        begin, numel = slab.starts[parameter.main], parameter.piece.numel()
        start, end = max(first - begin, 0), min(last - begin, numel)
        # One without elements has no moments, but steps to count: it goes with the column before it.
        if start < end or (numel == 0 and max(begin - 1, 0) in range(first, max(last, 1))):
            yield Piece(parameter, start, end, begin + start - first)


# -- its way through the device -------------------------------------------------------------------

BUFFERS = 3
_NUMBER = 4  # bytes of a float32
_SCRATCH = 12  # bytes per number that torch's Adam, where it is not fused, allocates at most
_ALIGNMENT = 64  # columns, for vectorised copies


def columns_of(slabs: Sequence[Slab], times: int, scratch: int) -> int:
    """Return how many columns a chunk has: buffers and scratch are at most ``3 / times`` of all state.

    Args:
        slabs: the state.
        times: ``N`` of ``--swap-optimizer-times``.
        scratch: bytes per number that the optimizer allocates for what it updates.
    """
    total = sum(slab.rows.numel() for slab in slabs) * _NUMBER
    rows = max(slab.rows.size(0) for slab in slabs)
    columns = BUFFERS * total // times // (BUFFERS * rows * _NUMBER + scratch)
    return max(columns // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT)


def scratch_of(optimizer: Any) -> int:
    """Return the bytes per number that this optimizer's step allocates; a fused one needs none."""
    is_fused = all(group["fused"] for group in optimizer.param_groups) if is_torch_adam(optimizer) else True
    return 0 if is_fused else _SCRATCH


@dataclass
class _Buffer:
    """One staging buffer on the device."""

    memory: Tensor  # [rows * columns], float32
    loaded: Event
    updated: Event
    stored: Event

    def holding(self, chunk: Chunk) -> Tensor:
        """Return the chunk's rows, ``[rows, columns]``."""
        return self.memory[: chunk.host.numel()].view(chunk.host.shape)


class Pipeline:
    """The steps of one optimizer.

    Args:
        optimizer: the inner optimizer.
        slabs: its state.
        moments: of the same state.
        times: staging buffers are a ``times``-th of the state each, scratch included.
        integrity: broken by a step that fails after it has updated anything.

    Attributes:
        integrity: as given.
        completed: how many steps have been made.
    """

    def __init__(
        self, optimizer: Any, slabs: Sequence[Slab], moments: Moments, times: int, integrity: StepIntegrity
    ) -> None:
        columns = columns_of(slabs, times, scratch_of(optimizer))
        self.chunks = [chunk for slab in slabs for chunk in cut(slab, columns)]
        self._size = max(chunk.host.numel() for chunk in self.chunks)
        self._slabs = slabs  # their memory is the pool's for as long as they live
        self._optimizer, self._moments = optimizer, moments
        platform = platforms.current()
        self._loader, self._storer = platform.new_stream(), platform.new_stream()
        self._stored = platform.new_event()
        self._buffers: list[_Buffer] = []
        self.integrity = integrity
        self.completed = 0

    @property
    def staging(self) -> int:
        """Return the bytes of the staging buffers on the device now."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def prefetch(self) -> None:
        """Start to load the first chunks; does nothing if they are loaded.

        Raises:
            Exception: the device's, if it has no memory for the buffers; then nothing is loaded.
        """
        if self._buffers:
            return
        platform = platforms.current()
        device = platform.device
        buffers: list[_Buffer] = []
        try:
            for _ in range(min(BUFFERS, len(self.chunks))):
                memory = torch.empty(self._size, dtype=torch.float32, device=device)
                buffers.append(_Buffer(memory, *(platform.new_event() for _ in range(3))))
            # Earlier work may still use the memory, and the host's may not be written yet.
            self._loader.wait_stream(platform.current_stream())
            self._loader.wait_event(self._stored)
            for number, buffer in enumerate(buffers):
                self._load(number, buffer)
        except BaseException:
            _release(buffers, self._loader)
            raise
        self._buffers = buffers  # all of them hold what they should

    def discard(self) -> None:
        """Drop what is loaded, for a step that does not come; the host's memory may be written afterwards."""
        if self._buffers:
            self._loader.synchronize()
            self._drop()

    def settle(self) -> None:
        """Wait until all state is on the host, and nothing else is under way."""
        self.discard()
        self._stored.synchronize()

    def mark_broken(self) -> None:
        """Say that the state is that of no step."""
        self.integrity.mark_broken(parameter.main for slab in self._slabs for parameter in slab.parameters)

    @torch.no_grad()
    def step(
        self, update: Callable[[], Any], updated: Callable[[int, Event], Any] = lambda number, event: None
    ) -> None:
        """Make one step over all chunks.

        Args:
            update: the optimizer's own step.
            updated: called with each chunk's number and the event that its update is recorded in.

        Raises:
            RuntimeError: a step before this one has failed in the middle.
            Exception: whatever ``update`` raises. If it has written anything, the state is that of no step.
        """
        self.integrity.require()
        self.prefetch()
        counters: dict[Tensor, dict[str, Any]] = {}
        groups: dict[int, dict[str, Any]] = {}
        try:
            for number in range(len(self.chunks)):
                self._update(number, update, counters, groups)
                self._store(number)
                updated(number, self._buffers[number % BUFFERS].updated)
                if number + BUFFERS < len(self.chunks):
                    self._load(number + BUFFERS, self._buffers[number % BUFFERS])
        finally:
            self._drop()
        for main, counted in counters.items():
            _assign(self._optimizer.state[main], counted)
        for index, counted in groups.items():
            _assign(self._optimizer.param_groups[index], counted)
        self.integrity.all_loaded()
        self.completed += 1

    def _load(self, number: int, buffer: _Buffer) -> None:
        chunk = self.chunks[number]
        with platforms.current().use_stream(self._loader):
            if number >= BUFFERS:
                self._loader.wait_event(buffer.stored)
            _copy(buffer.holding(chunk), chunk.host)
            buffer.loaded.record(self._loader)

    def _update(
        self,
        number: int,
        update: Callable[[], Any],
        counters: dict[Tensor, dict[str, Any]],
        groups: dict[int, dict[str, Any]],
    ) -> None:
        chunk, buffer = self.chunks[number], self._buffers[number % BUFFERS]
        stream = platforms.current().current_stream()
        stream.wait_event(buffer.loaded)
        rows = buffer.holding(chunk)
        parts = {piece: _part(piece, rows) for piece in chunk.pieces}
        with self._only(parts, rows) as view:
            counters_of_view = [each for state in view.state.values() for each in _tensors(state)]
            writes = Writes(self._optimizer, [*parts.values(), *counters_of_view])
            try:
                update()
            except BaseException:
                if writes.may_have_happened():
                    self.mark_broken()
                raise
        self.mark_broken()  # until the last chunk is updated and all is counted
        for piece, part in parts.items():
            if part in view.state:
                counters[piece.parameter.main] = _without_moments(view.state[part])
            if piece.parameter.weights is not None:
                piece.parameter.weights()[piece.start : piece.end].copy_(part)
        groups.update(view.groups)
        buffer.updated.record(stream)

    def _store(self, number: int) -> None:
        chunk, buffer = self.chunks[number], self._buffers[number % BUFFERS]
        with platforms.current().use_stream(self._storer):
            self._storer.wait_event(buffer.updated)
            _copy(chunk.host, buffer.holding(chunk))
            buffer.stored.record(self._storer)
            self._stored.record(self._storer)

    def _drop(self) -> None:
        _release(self._buffers, self._loader, self._storer)
        self._buffers = []

    @contextmanager
    def _only(self, parts: Mapping[Piece, Tensor], rows: Tensor) -> Iterator[_View]:
        """Let the optimizer see the parts that have a gradient, as if they were its parameters."""
        all_groups, all_state = self._optimizer.param_groups, self._optimizer.state
        view = _View({}, defaultdict(dict))
        for piece, part in parts.items():
            main, index = piece.parameter.main, piece.parameter.group
            if main.grad is None:
                continue
            part.grad = local_of(main.grad).view(-1)[piece.start : piece.end]
            if index not in view.groups:
                view.groups[index] = _own_tensors({**all_groups[index], "params": []})
            view.groups[index]["params"].append(part)
            begun = _without_moments(self._moments.begin(main, all_groups[index]))
            columns = slice(piece.column, piece.column + part.numel())
            moments = dict(zip(MOMENTS, rows[-2:, columns], strict=True))
            view.state[part] = {**_own_tensors(begun), **moments}
        self._optimizer.param_groups, self._optimizer.state = list(view.groups.values()), view.state
        try:
            yield view
        finally:
            self._optimizer.param_groups, self._optimizer.state = all_groups, all_state


@dataclass
class _View:
    """The optimizer's groups and state as it sees them during the update of a chunk."""

    groups: dict[int, dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]


def _part(piece: Piece, rows: Tensor) -> Tensor:
    """Return the weights to update: the master weights that were loaded, or the model's own."""
    if piece.parameter.weights is None:
        return piece.parameter.piece.detach().view(-1)[piece.start : piece.end]
    return rows[0, piece.column : piece.column + piece.end - piece.start]


def _release(buffers: Sequence[_Buffer], *streams: Stream) -> None:
    """Let the buffers' memory go when the streams are done with it."""
    for buffer in buffers:
        for stream in streams:
            platforms.current().record_stream(buffer.memory, stream)


def _copy(destination: Tensor, source: Tensor) -> None:
    for to, come_from in zip(destination, source, strict=True):  # rows, each contiguous
        to.copy_(come_from, non_blocking=True)


def _without_moments(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in MOMENTS}


def _own_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy tensors, to count them up in place: a parameter in several chunks is one step older."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _assign(old: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Take over counters; nothing else in a state or group changes in a step."""
    if isinstance(old.get("step"), Tensor):
        old["step"].copy_(new["step"])
    elif "step" in new:
        old["step"] = new["step"]
