"""Pipelined optimizer step over chunks of host state: load, update and store run at the same time.

A *slab* is one float32 host buffer ``[rows, numel]``. It has the parameters of an optimizer one after the
other, each at the same columns in every row. The rows are master weight, ``exp_avg`` and ``exp_avg_sq``, or
only the two moments for parameters that are float32 weights of the model. A *chunk* is a range of columns.
Adam works element by element, so a chunk may begin and end inside a parameter. Parameters and chunks begin at
multiples of 64 columns, so that vectorised kernels round each element as in a step of the whole parameter.

There are three staging buffers on the device. While Adam updates one chunk on the current stream, the next
chunk is loaded into the second buffer and the previous chunk is stored from the third, on separate streams.
The buffers exist from the first load, which may start before the gradients are complete, to the end of the
step.
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
from mindspeed_dsa.optimizers.integrity import StepIntegrity, Writes
from mindspeed_dsa.optimizers.moments import MOMENTS, Moments, is_torch_adam
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.platforms import host_pool
from mindspeed_dsa.platforms.base import Event, Stream

# torch's fused Adam on CPUs rounds the elements behind the last whole vector in another way.
_ALIGNMENT = 64  # columns

# -- state on the host ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Parameter:
    """Tensor that an optimizer updates.

    Attributes:
        main: optimizer's own tensor, a key of its state. Its values are on the host, unless it is the model's
            float32 weight itself.
        group: index of its param group.
        weights: function that returns the flat model weights that are rounded copies of ``main``,
            ``[piece.numel()]``; ``None`` if ``main`` is itself the model's weight.
        position: sort key for the update order; under sharding, the position of the parameter's bucket.
    """

    main: Tensor
    group: int
    weights: Callable[[], Tensor] | None
    position: int = 0

    @property
    def piece(self) -> Tensor:
        """Return this rank's shard of ``main``, or ``main`` itself if it is not sharded."""
        return local_of(self.main)

    @property
    def rows(self) -> int:
        """Return the number of slab rows: 3 with a master weight, 2 with moments only."""
        return 2 if self.weights is None else 3


class Slab:
    """Host buffer for all parameters that need the same number of rows.

    Attributes:
        rows: float32 ``[rows, numel]`` on the host, with moments initially zero.
        starts: dict from parameter to its first column.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = sorted(parameters, key=lambda each: each.position)
        count = self.parameters[0].rows
        self.starts: dict[Tensor, int] = {}
        numel = 0
        for param in self.parameters:
            self.starts[param.main] = numel
            numel += -(-param.piece.numel() // _ALIGNMENT) * _ALIGNMENT
        # One extra number: Megatron's writer assumes that a tensor which fills its storage never changes.
        memory = host_pool.shared.keep(4 * (count * numel + 1), owner=self).view(torch.float32)
        self.rows = memory[:-1].view(count, numel)
        self.rows[-2:].zero_()

    def of(self, parameter: Parameter) -> tuple[Tensor, ...]:
        """Return views of the parameter's values on this rank, one per row, in the shard's shape."""
        start, piece = self.starts[parameter.main], parameter.piece
        return tuple(row[start : start + piece.numel()].view(piece.shape) for row in self.rows)


@dataclass(frozen=True)
class Piece:
    """Slice ``[start:end]`` of a flat parameter, stored in a chunk from column ``column`` on."""

    parameter: Parameter
    start: int
    end: int
    column: int


@dataclass(frozen=True)
class Chunk:
    """Range of columns of a slab.

    Attributes:
        host: view of the slab, ``[rows, columns]``.
        pieces: slices of parameters in the chunk, in order.
    """

    host: Tensor
    pieces: tuple[Piece, ...]


def cut(slab: Slab, columns: int) -> list[Chunk]:
    """Cut a slab into chunks of ``columns`` columns; the last chunk may be shorter."""
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
        # A parameter without elements has no moments but a step count: it goes with the column before it.
        if start < end or (numel == 0 and max(begin - 1, 0) in range(first, max(last, 1))):
            yield Piece(parameter, start, end, begin + start - first)


# -- staging on the device -------------------------------------------------------------------------

BUFFERS = 3
_NUMBER = 4  # bytes of a float32
_SCRATCH = 12  # maximum bytes per number that torch's unfused Adam allocates


def columns_of(slabs: Sequence[Slab], times: int, scratch: int) -> int:
    """Return the chunk size for which buffers and scratch take at most ``3 / times`` of the state's size.

    Args:
        slabs: host state.
        times: ``N`` of ``--swap-optimizer-times``.
        scratch: temporary memory of the optimizer's step, in bytes per updated number.
    """
    # Three rows, unfused Adam: 3 buffers x 3 rows x 4 bytes + 12 bytes = 48 bytes per column.
    total = sum(slab.rows.numel() for slab in slabs) * _NUMBER
    rows = max(slab.rows.size(0) for slab in slabs)
    columns = BUFFERS * total // times // (BUFFERS * rows * _NUMBER + scratch)
    return max(columns // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT)


def scratch_of(optimizer: Any) -> int:
    """Return the temporary memory of the optimizer's step, in bytes per updated number."""
    # A fused step needs no temporary memory.
    is_fused = all(group["fused"] for group in optimizer.param_groups) if is_torch_adam(optimizer) else True
    return 0 if is_fused else _SCRATCH


@dataclass
class _Buffer:
    """Staging buffer on the device."""

    memory: Tensor  # [rows * columns], float32
    loaded: Event
    updated: Event
    stored: Event

    def holding(self, chunk: Chunk) -> Tensor:
        """Return the chunk's rows in the buffer, ``[rows, columns]``."""
        return self.memory[: chunk.host.numel()].view(chunk.host.shape)


class Pipeline:
    """Pipelined steps of one optimizer.

    Args:
        optimizer: inner optimizer.
        slabs: host state of the optimizer.
        moments: moments in the slabs.
        times: divisor N; three staging buffers and scratch memory take at most 3 / N of the state.
        integrity: record of broken steps, marked by a step that fails after an update.

    Attributes:
        integrity: record of broken steps.
        completed: number of completed steps.
    """

    def __init__(
        self, optimizer: Any, slabs: Sequence[Slab], moments: Moments, times: int, integrity: StepIntegrity
    ) -> None:
        columns = columns_of(slabs, times, scratch_of(optimizer))
        self.chunks = [chunk for slab in slabs for chunk in cut(slab, columns)]
        self._size = max(chunk.host.numel() for chunk in self.chunks)
        self._slabs = slabs  # keeps their memory from returning to the pool
        self._optimizer, self._moments = optimizer, moments
        platform = platforms.current()
        self._loader, self._storer = platform.new_stream(), platform.new_stream()
        self._stored = platform.new_event()
        self._buffers: list[_Buffer] = []
        self.integrity = integrity
        self.completed = 0

    @property
    def staging(self) -> int:
        """Return the current size of the staging buffers in bytes."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def prefetch(self) -> None:
        """Start to load the first chunks, unless they are loaded already.

        Raises:
            Exception: out-of-memory error of the device, after which nothing is loaded.
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
            # Earlier work may still use the memory, and the last stores to the host may not be done.
            self._loader.wait_stream(platform.current_stream())
            self._loader.wait_event(self._stored)
            for number, buffer in enumerate(buffers):
                self._load(number, buffer)
        except BaseException:
            _release(buffers, self._loader)
            raise
        self._buffers = buffers  # assigned last, when every load was started

    def discard(self) -> None:
        """Discard chunks loaded for a step that is skipped; afterwards host memory may be written."""
        if self._buffers:
            self._loader.synchronize()
            self._drop()

    def settle(self) -> None:
        """Wait until all state is on the host and no copy is running."""
        self.discard()
        self._stored.synchronize()

    def mark_broken(self) -> None:
        """Mark the state as broken: some parameters have been updated and others have not."""
        self.integrity.mark_broken(parameter.main for slab in self._slabs for parameter in slab.parameters)

    @torch.no_grad()
    def step(
        self, update: Callable[[], Any], updated: Callable[[int, Event], Any] = lambda number, event: None
    ) -> None:
        """Make one step over all chunks.

        Args:
            update: ``step`` method of the inner optimizer.
            updated: callback that takes each chunk's number and the event recorded after its update.

        Raises:
            RuntimeError: an earlier step failed in the middle.
            Exception: any error of ``update``. The state is marked broken if anything was written.
        """
        self.integrity.require()
        if self._moments.moved():
            self.settle()
            self._moments.take_back()
        self.prefetch()
        counters: dict[Tensor, dict[str, Any]] = {}
        groups: dict[int, dict[str, Any]] = {}
        try:
            for number in range(len(self.chunks)):
                self._update(number, update, counters, groups)
                self._store(number)
                updated(number, self._buffers[number % BUFFERS].updated)
                # The buffer is free again once its chunk is stored: `_load` waits for that.
                if number + BUFFERS < len(self.chunks):
                    self._load(number + BUFFERS, self._buffers[number % BUFFERS])
        finally:
            self._drop()
        # Counters are written once per step, when all chunks of a parameter are updated.
        for main, counted in counters.items():
            _assign(self._optimizer.state[main], counted)
        for index, counted in groups.items():
            _assign(self._optimizer.param_groups[index], counted)
        self.integrity.all_loaded()
        self.completed += 1

    def _load(self, number: int, buffer: _Buffer) -> None:
        chunk = self.chunks[number]
        with platforms.current().use_stream(self._loader):
            if number >= BUFFERS:  # an earlier chunk of this step used the buffer
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
        self.mark_broken()  # reset after the last chunk, when all counters are written
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
        # After an error the step's own stream may still write a chunk that was not stored.
        _release(self._buffers, self._loader, self._storer, platforms.current().current_stream())
        self._buffers = []

    @contextmanager
    def _only(self, parts: Mapping[Piece, Tensor], rows: Tensor) -> Iterator[_View]:
        """Restrict the optimizer to the parameter slices of one chunk inside the block."""
        all_groups, all_state = self._optimizer.param_groups, self._optimizer.state
        view = _View({}, defaultdict(dict))
        for piece, part in parts.items():
            main, index = piece.parameter.main, piece.parameter.group
            if main.grad is None:
                # As in a stock step, parameters without a gradient are not updated.
                continue
            part.grad = local_of(main.grad).reshape(-1)[piece.start : piece.end]
            if index not in view.groups:
                view.groups[index] = _own_tensors({**all_groups[index], "params": []})
            view.groups[index]["params"].append(part)
            begun = _without_moments(self._moments.begin(main, all_groups[index]))
            columns = slice(piece.column, piece.column + part.numel())
            moments = dict(zip(MOMENTS, rows[-2:, columns], strict=True))
            # The moments are views of the staging buffer, so the update writes into it.
            view.state[part] = {**_own_tensors(begun), **moments}
        self._optimizer.param_groups, self._optimizer.state = list(view.groups.values()), view.state
        try:
            yield view
        finally:
            self._optimizer.param_groups, self._optimizer.state = all_groups, all_state


@dataclass
class _View:
    """Temporary param groups and state of the inner optimizer for the update of one chunk."""

    groups: dict[int, dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]


def _part(piece: Piece, rows: Tensor) -> Tensor:
    """Return the piece's weights to update: master weights loaded in ``rows``, or the model's weights."""
    if piece.parameter.weights is None:
        return piece.parameter.piece.detach().view(-1)[piece.start : piece.end]
    return rows[0, piece.column : piece.column + piece.end - piece.start]


def _release(buffers: Sequence[_Buffer], *streams: Stream) -> None:
    """Free the buffers once the streams have finished using them."""
    for buffer in buffers:
        for stream in streams:
            platforms.current().record_stream(buffer.memory, stream)


def _copy(destination: Tensor, source: Tensor) -> None:
    for to, come_from in zip(destination, source, strict=True):  # rows, each contiguous
        to.copy_(come_from, non_blocking=True)


def _without_moments(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in MOMENTS}


def _own_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the dict with cloned tensors."""
    # Adam increments counters in place. A parameter in several chunks must count one step, so every chunk
    # starts from a copy of the old counter.
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _assign(old: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Copy the step counter from ``new`` to ``old``; a step changes no other entry of these dicts."""
    if isinstance(old.get("step"), Tensor):
        old["step"].copy_(new["step"])
    elif "step" in new:
        old["step"] = new["step"]
