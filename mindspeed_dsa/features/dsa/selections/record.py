"""Recording of selections step by step, and choice of the selections that each microbatch replays.

Selections are copied to the host and written by a background thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.selections.feature import RECORD, REPLAY, Options, header_of
from mindspeed_dsa.features.dsa.selections.format import Header, Key, Recording, Run, Writer, cut_off
from mindspeed_dsa.features.dsa.selections.replay import HandedOver, Recorded, SelectionError
from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.megatron.selection_source import (
    Chosen,
    LayerRows,
    Microbatch,
    RowRun,
    SelectionSource,
    current,
)
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.schedule.events import Event, Kind

_Function = Callable[..., Any]

_MOST_BYTES = 256 << 20
"""Largest number of bytes queued for the writer thread. If the queue is full, the layer waits."""
EXIT_STATUS = 74
"""Exit status of a process with an incomplete recording, ``EX_IOERR`` of sysexits.h."""


# -- background writer ---------------------------------------------------------------------------


def exit_status() -> int | None:
    """Return the exit status of a process whose recording is incomplete. None: leave its status as it is."""
    # torchrun with restarts left would restart all ranks after another status than 0, even when the job is
    # already done, and train again.
    most, done = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return None if int(most) > int(done) else EXIT_STATUS


@dataclass(frozen=True)
class _Piece:
    """Selection of one layer and microbatch, queued for writing."""

    key: Key
    batch: int
    width: int
    runs: Sequence[RowRun]
    chosen: Chosen
    mass: Tensor | None
    tokens: Tensor | None
    arrived: platforms.Event | None

    @property
    def nbytes(self) -> int:
        """Host memory of the tensors, in bytes."""
        kept = (*self.chosen.topk_indices, self.mass, self.tokens)
        return sum(0 if tensor is None else tensor.nbytes for tensor in kept)


class Recorder:
    """Recorder of one rank, with a background thread that writes.

    Args:
        options: options of the feature.
        header: header of the model.
        rank: rank of the process; it is part of the file name.
        log: log of the feature.

    Attributes:
        failed: message of the error that stopped the recording; empty while it works.
        records: number of records written.
    """

    def __init__(self, options: Options, header: Header, rank: int, log: Log) -> None:
        assert options.record is not None, "who records names a folder"
        self._folder, self._options = options.record, options
        self._header, self._rank, self._log = header, rank, log
        self._waiting: deque[_Piece] = deque()
        self._changed = Condition()
        self._bytes, self._ends, self._busy = 0, False, False
        self._thread: Thread | None = None
        self._writer: Writer | None = None
        self.failed, self.records = "", 0

    def begin(self, ranks: int, step: int) -> None:
        """Truncate an earlier job's records in the folder, from this job's first step on.

        Args:
            ranks: number of ranks of the job. All ranks must call this.
            step: first step of the job.
        """
        try:
            cut_off(self._folder, self._rank, ranks, step)
        except OSError as error:
            self._stop(f"step {step}", error)
            atexit.register(self.finish)

    def take(self, key: Key, rows: LayerRows, chosen: Chosen, mass: Tensor | None = None) -> None:
        """Queue the selection of a layer for writing.

        Args:
            key: key of the microbatch's first sequence.
            rows: description of the layer's query tokens on this rank.
            chosen: selected keys; see :meth:`.SelectionSource.took`.
            mass: attention probability of each key ``[batch, rows, topk]`` fp32, or None.
        """
        layers = self._options.layers
        if self.failed or (layers is not None and key.layer not in layers):
            return
        if self._thread is None:
            self._ends = False
            self._thread = Thread(target=self._work, name="recorded selections", daemon=True)
            self._thread.start()
            atexit.register(self.finish)
        arrived = None

        def copied(tensor: Tensor | None) -> Tensor | None:
            nonlocal arrived
            if tensor is None or tensor.device.type == "cpu":
                # Token tensors belong to the job, which may load the next batch into the same memory.
                return tensor.clone() if tensor is not None and tensor is rows.tokens else tensor
            on_host = platforms.current().empty_pinned(tensor.shape, tensor.dtype)
            arrived = platforms.current().copy_async(on_host, tensor.detach())
            return on_host

        kept = Chosen(tuple(map(copied, chosen.topk_indices)), chosen.by_run)
        width, runs = min(rows.topk, rows.keys), rows.find_runs()
        piece = _Piece(key, rows.batch, width, runs, kept, copied(mass), copied(rows.tokens), arrived)
        with self._changed:
            # An empty queue takes a piece of any size, as it could never fit otherwise.
            self._changed.wait_for(lambda: not self._waiting or self._bytes + piece.nbytes <= _MOST_BYTES)
            self._waiting.append(piece)
            self._bytes += piece.nbytes
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all queued selections are written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def finish(self) -> None:
        """Write queued selections. If some are missing, end the process with :func:`exit_status`."""
        self.close()
        if self.failed and exit_status() is not None:
            # Exit handlers registered after this one have run. os._exit skips the earlier ones: flush
            # logging and streams here.
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_STATUS)

    def close(self) -> None:
        """Write queued selections, and close the file."""
        if self._thread is None:
            return
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()
        self._thread = None
        if not self.failed:
            atexit.unregister(self.finish)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if not self._waiting:
                    break
                piece = self._waiting.popleft()
                self._busy = True
            try:
                if not self.failed:
                    self._write(piece)
            except Exception as error:  # any error: training must never wait for a dead thread
                self._stop(f"step {piece.key.step}, layer {piece.key.layer}", error)
            finally:
                with self._changed:
                    self._bytes -= piece.nbytes
                    self._busy = False
                    self._changed.notify_all()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _stop(self, where: str, error: Exception) -> None:
        self.failed = f"{RECORD} {self._folder}: {error}"
        self._log.error(
            f"{self.failed}; recording ends at {where}, training goes on, and this process will end with "
            f"{'its own status' if exit_status() is None else f'status {EXIT_STATUS}'}"
        )

    def _write(self, piece: _Piece) -> None:
        if piece.arrived is not None:
            piece.arrived.synchronize()
        if self._writer is None:
            self._writer = Writer(self._folder, self._rank, self._header)
        for sequence in range(piece.batch):
            runs, local_rows, keys = self._rows(piece, sequence)
            if not runs:
                continue
            mass = None
            if piece.mass is not None:
                # Mass is stored in the order of ascending keys; -1 entries sort to the tail.
                order = np.argsort(np.where(keys >= 0, keys, np.iinfo(np.int32).max), axis=1, kind="stable")
                keys = np.take_along_axis(keys, order, axis=1)
                mass = np.take_along_axis(piece.mass[sequence].numpy()[local_rows], order, axis=1)
            tokens = None if piece.tokens is None else piece.tokens[sequence].numpy()[local_rows]
            place = piece.key._replace(sequence=piece.key.sequence + sequence)
            self._writer.append(place, runs, keys, mass, tokens)
            self.records += 1

    def _rows(
        self, piece: _Piece, sequence: int
    ) -> tuple[list[Run], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return a sequence's runs to record, the indices of their tokens on this rank, and their keys."""
        width, selection = piece.width, piece.chosen
        runs, rows = [], [np.zeros(0, np.int64)]
        parts = [np.zeros((0, width), np.int32)]
        for number, (first, end, low, high) in enumerate(piece.runs):
            if high == low:
                continue  # padding
            position = high - (end - first)
            indices = selection.topk_indices[number if selection.by_run else 0]
            if indices is None:
                # No indices: the rows attend to all visible keys, 0 .. visible - 1.
                visible = np.arange(position - low + 1, high - low + 1, dtype=np.int32)
                keys = np.arange(width, dtype=np.int32)[None].repeat(end - first, axis=0)
                keys[keys >= visible[:, None]] = -1
            else:
                part = slice(end - first) if selection.by_run else slice(first, end)
                keys = indices[sequence, part].numpy()
                # Keys by run already count from the run's first key.
                if low and not selection.by_run:
                    keys = np.where(keys >= 0, keys - low, -1)
                keys = np.pad(keys, ((0, 0), (0, width - keys.shape[1])), constant_values=-1)
            for begin, stop in self._wanted(position, high):
                runs.append(Run(low, begin, stop - begin))
                rows.append(np.arange(begin, stop) - position + first)
                parts.append(keys[begin - position : stop - position])
        return runs, np.concatenate(rows), np.concatenate(parts)

    def _wanted(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the runs of positions in ``[first, end)`` that the options select for recording."""
        if self._options.rows is None:
            return [(first, end)]
        wanted = np.array([position in self._options.rows for position in range(first, end)], np.int8)
        bounds = np.flatnonzero(np.diff(wanted, prepend=0, append=0)) + first
        return [(int(begin), int(stop)) for begin, stop in bounds.reshape(-1, 2)]


# -- steps of Megatron's schedules ---------------------------------------------------------------


class _ToDisk(SelectionSource):
    """Sink for one microbatch's selections. ``recorder`` is None if another rank records the same ones."""

    def __init__(self, recorder: Recorder | None, wants_mass: bool, step: int, place: int) -> None:
        self._recorder, self._wants_mass = recorder, wants_mass
        self._step, self._place = step, place

    def took(self, rows: LayerRows, chosen: Chosen, mass_of: Callable[[Tensor], Tensor]) -> None:
        self.asked, mass = True, None
        indices = chosen.topk_indices[0]
        # mass_of runs collectives, so it is called on all tensor parallel ranks, with recorder or without.
        if self._wants_mass and not chosen.by_run and indices is not None:
            mass = mass_of(indices)
        if self._recorder is not None:
            self._recorder.take(Key(self._step, self._place * rows.batch, rows.layer), rows, chosen, mass)


class Steps(pipeline_steps.Follower):
    """Follower of the schedule that sets the source and sink of selections for each microbatch.

    Args:
        context: context of the session.

    Attributes:
        recorder: recorder of this rank; None before the first step, and on ranks whose selections another
            rank records.
        step: number of the latest step, from 1.
    """

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context)
        self._options, self._log = context.options, context.log
        self._header: Header | None = None
        self._recording: Recording | None = None
        self.recorder: Recorder | None = None
        self.step, self._has_begun = 0, False
        self._selects = self._asked = self._evaluates = False

    def set_model(self, config: Any) -> None:
        """Set the model's configuration, and open the recording to replay.

        Raises:
            MindSpeedDSAError: the recording belongs to another model.
        """
        self._header = header_of(config)
        if self._options.replay is not None and self._recording is None:
            self._recording = Recording.open(self._options.replay)
            differences = list(self._recording.header.problems(self._header))
            if differences:
                raise MindSpeedDSAError(
                    f"{REPLAY} {self._options.replay} is of another model: {differences[0]}"
                )
            for problem in self._recording.problems:
                self._log.warning(f"{self._options.replay}: {problem}")

    def add_layers(self, layers: Iterable[int]) -> None:
        """Register layer numbers of this rank, to check at the end of a step that they used selections."""
        self._selects |= not set(layers).isdisjoint(self._model().computing)

    def run(self, schedule: _Function, args: Any, step: dict[str, Any]) -> Any:
        """Run a schedule, and record or replay its selections.

        Evaluation records nothing, and replays only selections that are passed with the batch.
        """
        self._asked, self._evaluates = False, bool(step.get("forward_only", False))
        before = current().microbatch
        try:
            if not self._evaluates:
                return super().run(schedule, args, step)
            if not self._options.with_batch:
                return schedule(*args, **step)
            self.following = True
            result = schedule(*args, **step)
            self.ends(step)
            return result
        finally:
            self.following = False
            self._outputs.clear()
            # A failed forward leaves its microbatch set, which must not leak into later forwards.
            current().microbatch = before

    def ends(self, step: dict[str, Any]) -> None:
        """Check that layers have used selections in the step.

        Raises:
            SelectionError: no layer of this rank read or reported a selection; its attention is not ours.
        """
        replays = self._options.replay is not None or self._options.with_batch
        if (replays or self._records()) and self._selects and not self._asked:
            what = (
                "asked for the keys that it is to attend to"
                if replays
                else "brought the keys that it selects"
            )
            raise SelectionError(
                f"{REPLAY if replays else RECORD}: no layer of this rank has {what}, so that "
                "its attention is not that of --use-fused-dsa; `python -m mindspeed_dsa doctor FLAGS` shows "
                "which patches of DSA are skipped on this release of Megatron-core, and context parallel "
                "ranks of 0.19 need --pack-documents for packs"
            )

    def begins(self, step: dict[str, Any]) -> bool:
        """Count the step; start recording in the first one."""
        self.step = self._step_of_job() or self.step + 1
        if self._options.record is not None and not self._has_begun:
            self._has_begun = True
            recorder = Recorder(self._options, self._model(), dist.get_rank(), self._log)
            # Not from self.step: --iterations-to-skip runs no schedule, and an older run may have recorded.
            recorder.begin(dist.get_world_size(), min(self.step, self._loaded_step() + 1))
            # Tensor parallel ranks select the same keys: only the first one records.
            if self.megatron("core.parallel_state").get_tensor_model_parallel_rank() == 0:
                self.recorder = recorder
        return True

    def _step_of_job(self) -> int | None:
        """Return Megatron-LM's step number, from 1; None in a job with its own training loop."""
        iteration = getattr(self._args_of_job(), "curr_iteration", None)
        return None if iteration is None else int(iteration) + 1

    def _loaded_step(self) -> int:
        """Return the step of the checkpoint that the job goes on from, or the step before this one."""
        iteration = getattr(self._args_of_job(), "iteration", None)
        return self.step - 1 if iteration is None else int(iteration)

    def _args_of_job(self) -> Any:
        variables = sys.modules.get(f"{self.megatron.root}.training.global_vars")
        return getattr(variables, "_GLOBAL_ARGS", None)

    def before(self, events: Sequence[Event]) -> None:
        """Set the current microbatch at the start of its forward."""
        for event in events:
            if event.kind is Kind.FORWARD:
                current().microbatch = self._microbatch(event.microbatch)

    def after(self, events: Sequence[Event]) -> None:
        """Clear the current microbatch."""
        microbatch = current().microbatch
        for end in () if microbatch is None else (microbatch.source, microbatch.sink):
            self._asked |= end is not None and end.asked
        current().microbatch = None

    def _microbatch(self, number: int) -> Microbatch:
        state, options = self.megatron("core.parallel_state"), self._options
        # Index in the global batch: microbatch 2 of data parallel rank 1 of 4 is number 2 * 4 + 1 = 9.
        place = number * state.get_data_parallel_world_size() + state.get_data_parallel_rank()
        microbatch = Microbatch()
        if self._recording is not None:
            microbatch.source = Recorded(self._recording, self.step, place, options.missing)
        elif options.with_batch:
            microbatch.source = HandedOver(self._model(), options.missing)
        if self._records():
            microbatch.sink = _ToDisk(self.recorder, options.mass, self.step, place)
        return microbatch

    def _records(self) -> bool:
        options = self._options
        is_wanted = options.steps is None or self.step in options.steps
        return options.record is not None and is_wanted and not self._evaluates

    def _model(self) -> Header:
        assert self._header is not None, "forward ran before the model was built"
        return self._header


def start_at(context: Context[Options], step: int) -> None:
    """Set the next step number, in a job with its own training loop that resumes from a checkpoint.

    Args:
        context: session's context of the feature, ``session.contexts["dsa-recorded-selections"]``.
        step: number of the next step, from 1.
    """
    Steps.of(context).step = step - 1


def note_model(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerBlock.__init__`` to pass configuration and layer numbers to :class:`Steps`."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        steps = Steps.of(context)
        steps.set_model(config)
        original(self, config, *args, **kwargs)
        steps.add_layers(layer.layer_number for layer in self.layers)

    return __init__


def take_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``GPTModel.forward`` and ``build_schedule_plan`` to store the microbatch's token ids."""

    def forward(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        microbatch = current().microbatch
        if microbatch is not None and self.pre_process:
            microbatch.tokens = input_ids
        return original(self, input_ids, *args, **kwargs)

    return forward
