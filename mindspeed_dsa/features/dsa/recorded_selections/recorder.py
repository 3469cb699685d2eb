"""Selections on their way from a layer to the disk, by a thread beside training."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Thread

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.features.dsa.recorded_selections.feature import RECORD, Options
from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron.replayed_selections import LayerRows
from mindspeed_dsa.platforms import Event
from mindspeed_dsa.runs.selection_rows import Ints, Longs
from mindspeed_dsa.runs.selections import Header, Key, Run, Writer, cut_off

Floats = npt.NDArray[np.float32]

_MOST_BYTES = 256 << 20
"""Bytes that may wait for the thread; the layer waits for it beyond."""
EXIT_STATUS = 74
"""Status of a process whose recording is not whole, ``EX_IOERR`` of sysexits.h."""


def exit_status() -> int | None:
    """Return the status of a process whose recording is not whole; None: the one that the job ends with.

    torchrun that has restarts left starts all ranks again when one ends with another status than 0, after the
    last step too: the job would train once more.
    """
    most, done = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return None if int(most) > int(done) else EXIT_STATUS


@dataclass(frozen=True)
class _Piece:
    """Selection of one layer, and where it belongs."""

    key: Key
    rows: LayerRows
    indices: Sequence[Tensor | None]
    mass: Tensor | None
    tokens: Tensor | None
    by_run: bool
    arrived: Event | None

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        kept = (*self.indices, self.mass, self.tokens)
        return sum(0 if each is None else each.nbytes for each in kept)


class Recorder:
    """Recording of one rank.

    Args:
        options: of the feature.
        header: of the model.
        rank: of the process, whose file it is.
        log: of the feature.

    Attributes:
        failed: why it has stopped; empty while it has not.
        records: how many were written.
        nbytes: bytes of these.
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
        self.failed, self.records, self.nbytes = "", 0, 0

    def begin(self, ranks: int, step: int) -> None:
        """Cut off what an earlier job recorded in the folder and this one does again.

        Args:
            ranks: of the job, each of which calls it.
            step: the first one of the job.
        """
        try:
            cut_off(self._folder, self._rank, ranks, step)
        except OSError as error:
            self._stop(f"step {step}", error)
            atexit.register(self.finish)

    def take(
        self,
        key: Key,
        rows: LayerRows,
        indices: Sequence[Tensor | None],
        by_run: bool,
        mass: Tensor | None = None,
    ) -> None:
        """Take what a layer's rows attended to; arguments as of :meth:`.replayed_selections.Sink.take`.

        Args:
            key: place of the microbatch's first sequence.
            rows: of the layer.
            indices: the selection.
            by_run: whether it comes run by run.
            mass: of its keys, if it is wanted.
        """
        layers = self._options.layers
        if self.failed or (layers is not None and key.layer not in layers):
            return
        if self._thread is None:
            self._ends = False
            self._thread = Thread(target=self._work, name="recorded selections", daemon=True)
            self._thread.start()
            atexit.register(self.finish)
        copies: list[Tensor | None] = []
        arrived = None
        for each in (*indices, mass, rows.tokens):
            if each is None or each.device.type == "cpu":
                # Tokens are the job's, which may read the next batch into the same memory.
                copies.append(each.clone() if each is not None and each is rows.tokens else each)
                continue
            on_host = platforms.current().empty_pinned(each.shape, each.dtype)
            arrived = platforms.current().copy_async(on_host, each.detach())
            copies.append(on_host)
        piece = _Piece(key, rows, copies[:-2], copies[-2], copies[-1], by_run, arrived)
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._bytes + piece.nbytes <= _MOST_BYTES)
            self._waiting.append(piece)
            self._bytes += piece.nbytes
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything taken so far is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def finish(self) -> None:
        """Write what is left, and end a process whose recording is not whole with :func:`exit_status`."""
        self.close()
        if self.failed and exit_status() is not None:
            # Whoever registered later has run; who registered earlier, logging among them, is given its turn
            # here.
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_STATUS)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._thread is None:
            return
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()
        self._thread = None
        if not self.failed:
            atexit.unregister(self.finish)

    # -- the thread -----------------------------------------------------------------------------------

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
            except Exception as error:  # whatever it is, training must not wait for a thread that has ended
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
        for sequence in range(piece.rows.batch):
            runs, at, keys, mass = self._rows(piece, sequence)
            if runs:
                place = piece.key._replace(sequence=piece.key.sequence + sequence)
                tokens = None if piece.tokens is None else piece.tokens[sequence].numpy()[at]
                self.nbytes += self._writer.append(place, runs, keys, mass, tokens)
                self.records += 1

    def _rows(self, piece: _Piece, sequence: int) -> tuple[list[Run], Longs, Ints, Floats | None]:
        """Return the runs to record of a sequence, its rows on this rank, their keys, and maybe masses.

        Keys are counted from the begin of the document; with masses they are ascending.
        """
        width = min(piece.rows.topk, piece.rows.keys)
        runs, rows = [], [np.zeros(0, np.int64)]
        parts = [np.zeros((0, width), np.int32)]
        for number, (first, end, low, high) in enumerate(piece.rows.runs):
            if high == low:
                continue
            position = high - (end - first)
            indices = piece.indices[number if piece.by_run else 0]
            if indices is None:
                visible = np.arange(position - low + 1, high - low + 1, dtype=np.int32)
                keys = np.arange(width, dtype=np.int32)[None].repeat(end - first, axis=0)
                keys[keys >= visible[:, None]] = -1
            else:
                part = slice(end - first) if piece.by_run else slice(first, end)
                keys = indices[sequence, part].numpy()
                if low and not piece.by_run:
                    keys = np.where(keys >= 0, keys - low, -1)
                keys = np.pad(keys, ((0, 0), (0, width - keys.shape[1])), constant_values=-1)
            for begin, stop in self._wanted(position, high):
                runs.append(Run(low, begin, stop - begin))
                rows.append(np.arange(begin, stop) - position + first)
                parts.append(keys[begin - position : stop - position])
        at, keys = np.concatenate(rows), np.concatenate(parts)
        if piece.mass is None:
            return runs, at, keys, None
        # Shares lie behind the keys in ascending order.
        order = np.argsort(np.where(keys >= 0, keys, np.iinfo(np.int32).max), axis=1, kind="stable")
        mass = piece.mass[sequence].numpy()[at]
        return runs, at, np.take_along_axis(keys, order, axis=1), np.take_along_axis(mass, order, axis=1)

    def _wanted(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the runs of positions among these that are to be recorded."""
        if self._options.rows is None:
            return [(first, end)]
        found: list[tuple[int, int]] = []
        for position in range(first, end):
            if position not in self._options.rows:
                continue
            if found and found[-1][1] == position:
                found[-1] = (found[-1][0], position + 1)
            else:
                found.append((position, position + 1))
        return found
