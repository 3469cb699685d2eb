"""Watch thread of a rank: writes its record if the job hangs, on request, or if the rank fails.

It is a separate thread, because the main thread of a hanging job waits in a collective, outside of Python.
Ranks request each other's records through a file in the shared folder. Signals keep their previous effect.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mindspeed_dsa.features.diagnostics.collectives.feature import Options
from mindspeed_dsa.log import Log
from mindspeed_dsa.runs import collectives as files
from mindspeed_dsa.runs.files import write_atomically

_PERIOD_S = 1.0
"""Longest period between two looks, each with one ``stat`` per rank on a possibly shared file system."""
_FIRST_S = 0.05
"""First period; it doubles up to :data:`_PERIOD_S`."""
_STOPS_WITHIN_S = 2.0
"""Longest wait for the thread at the end, in case it hangs while writing to a dead file server."""

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Recorded(Protocol):
    """Interface of the recorder that the watch uses."""

    changed: float

    def place(self) -> str:
        """Return the current step, forwards and backwards as text."""

    def groups(self) -> tuple[files.Group, ...]:
        """Return a description of all groups, without their calls."""

    def forget(self) -> None:
        """Drop all groups and the watch."""


class Watch:
    """Watch thread of one rank.

    Args:
        options: feature's options.
        log: feature's log.
        recorder: recorder of the calls.

    Attributes:
        calls: file with the most recent calls.

    Raises:
        OSError: the folder is not writable.
    """

    def __init__(self, options: Options, log: Log, recorder: Recorded) -> None:
        self._log, self._silence_s = log, options.silence_s
        # Weak: a session without any applied patch is just garbage collected, and the watch must notice it.
        self._recorder = weakref.ref(recorder)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._job = _job_of_all_ranks(dist.distributed_c10d._get_default_store())
        self._folder = options.folder.absolute() / self._job
        self._folder.mkdir(parents=True, exist_ok=True)
        self._request, self._seen = self._folder / ".request", 0
        self._live = files.live_file(self._folder, self._rank)
        self.calls = files.Calls(self._live.with_suffix(".calls"))
        # Written at once, so that a rank that is killed leaves at least its host and process id.
        files.write(self._live, self._record("", recorder, {}))
        self._silent_since = 0.0
        self._failure: tuple[str, list[str]] | None = None
        self._writing = threading.RLock()  # the main thread writes, too, if it fails
        self._stopped = threading.Event()
        self._signals = [_Signal(each, self._live) for each in (signal.SIGUSR1, signal.SIGTERM)]
        self._previous_hook = sys.excepthook
        sys.excepthook = self._hook = _hook(self._previous_hook, weakref.WeakMethod(self._failed))
        atexit.register(self.stop)
        _watches.add(self)
        threading.Thread(target=self._watch, name="record-collectives", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread and remove this rank's temporary files, because the process ends normally."""
        if self._stopped.is_set():
            return
        self._let_go()
        atexit.unregister(self.stop)
        written = self._writing.acquire(timeout=_STOPS_WITHIN_S)
        for file in self._live.parent.glob(f"{self._live.stem}.*"):
            with contextlib.suppress(OSError):
                file.unlink()
        with contextlib.suppress(OSError):  # not empty: other ranks, or records
            self._folder.rmdir()
        if written:
            self._writing.release()

    def leave_child(self) -> None:
        """Drop the watch in a forked child, without touching the parent's files."""
        recorder = self._recorder()
        if recorder is not None and not self._stopped.is_set():
            recorder.forget()
            self._let_go()

    def _let_go(self) -> None:
        self._stopped.set()
        for each in self._signals:
            each.restore()
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook

    # -- triggers ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        period_s = _FIRST_S
        while not self._stopped.is_set():
            try:
                self._look()
            except Exception as error:  # a full file system or a bug here must not end training
                self._log.warning("%s gets no records: %r", self._folder, error, once=True)
            self._stopped.wait(period_s)
            period_s = min(2 * period_s, _PERIOD_S)

    def _look(self) -> None:
        """Check for signals, requests of other ranks, and the absence of collectives."""
        recorder = self._recorder()
        if recorder is None:
            self.stop()
            return
        for each in self._signals:
            if each.came():
                self._ask(each.name) if each.name == "SIGUSR1" else self._write(each.name)
        with contextlib.suppress(FileNotFoundError):
            changed = self._request.stat().st_mtime_ns
            if changed != self._seen:
                self._seen = changed
                asked = json.loads(self._request.read_text(encoding="utf-8"))
                if asked["rank"] != self._rank:
                    self._write(f"rank {asked['rank']}: {asked['reason']}")
        quiet_s = time.time() - recorder.changed
        if quiet_s > self._silence_s and self._silent_since != recorder.changed:
            self._silent_since = recorder.changed
            # A request since the last call was already answered with a record.
            if self._seen < recorder.changed * 1e9:
                self._ask(f"{files.PAUSED} for {quiet_s:.0f} s")

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._stopped.is_set():
            return
        self._failure = f"failed with {kind.__name__}: {error}", _lines(traceback.extract_tb(trace))
        with contextlib.suppress(Exception):
            self._ask(self._failure[0])
        self.stop()

    # -- writing ----------------------------------------------------------------------------------

    def _ask(self, reason: str) -> None:
        """Write this rank's record, and request the records of all other ranks."""
        with self._writing:
            write_atomically(self._request, json.dumps({"rank": self._rank, "reason": reason}))
        self._write(reason)
        short = textwrap.shorten(reason, 160)
        self._log.warning("%s: see python -m mindspeed_dsa hang %s", short, self._folder, ranks="all")

    def _write(self, reason: str) -> None:
        recorder = self._recorder()
        if recorder is None:
            return
        stacks = _stacks()
        if self._failure is not None:  # later signals are consequences of the failure
            reason, stacks["main"] = self._failure
        groups = files.with_calls(recorder.groups(), self._live.with_suffix(".calls"))
        record = self._record(reason, recorder, stacks, groups, self._write_torchs())
        with self._writing:
            if not self._stopped.is_set():
                files.write(files.record_file(self._folder, self._rank), record)

    def _record(self, reason: str, recorder: Recorded, *written: Any) -> files.Record:
        return files.Record(
            self._job,
            self._rank,
            self._ranks,
            socket.gethostname(),
            os.getpid(),
            time.time(),
            reason,
            recorder.place(),
            *written,
        )

    def list_group(self, group: files.Group) -> None:
        """Add a group to this rank's temporary file, which remains if the process is killed."""
        files.list_group(self._live, group)

    def strike_group(self, name: str) -> None:
        """Mark a group as destroyed in this rank's temporary file."""
        files.strike_group(self._live, name)

    def _write_torchs(self) -> str:
        """Dump torch's flight recorder, which knows the progress on the device; return the file's path."""
        dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
        if dump is None:
            return ""
        folder = self._folder / "torch"
        folder.mkdir(exist_ok=True)
        file = folder / f"rank_{self._rank}"
        file.write_bytes(dump(True, False, False))  # with stacks it may take minutes
        return str(file.relative_to(self._folder))


class _Signal:
    """Handler of one signal: ``faulthandler`` writes the main thread's stack to a file.

    A Python handler runs only when the main thread returns to Python, which a hanging collective never does.
    ``faulthandler`` runs immediately, and then calls the previous handler, so the signal keeps its effect.
    """

    def __init__(self, number: signal.Signals, live: Path) -> None:
        self._number, self.name, self._size = number, number.name, 0
        self._file = open(live.with_suffix(f".{number.name}"), "wb", buffering=0)  # noqa: SIM115
        self._before = signal.getsignal(number)
        # Do not chain SIGUSR1 to the default action, which ends the process: here it only requests records.
        self._chained = number == signal.SIGTERM or self._before is not signal.SIG_DFL
        faulthandler.register(number, self._file, all_threads=False, chain=self._chained)
        self._interrupt()

    def _interrupt(self) -> None:
        # Without this, the interrupted system call restarts, and a previous Python handler never runs.
        if self._chained:
            signal.siginterrupt(self._number, True)

    def came(self) -> bool:
        """Return whether the signal has arrived since the last call."""
        before, self._size = self._size, os.fstat(self._file.fileno()).st_size
        if self._size != before:
            self._interrupt()
        return self._size != before

    def restore(self) -> None:
        """Restore the previous handler, unless another handler has been set since."""
        now = signal.getsignal(self._number)
        if now is not self._before and threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        faulthandler.unregister(self._number)
        if now is not self._before:
            signal.signal(self._number, now)
        self._file.close()


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _leave_child() -> None:
    for watch in list(_watches):
        watch.leave_child()


os.register_at_fork(after_in_child=_leave_child)


def _hook(previous: _Hook, failed: weakref.WeakMethod[_Hook]) -> _Hook:
    """Return an excepthook that also writes a record; it holds the watch weakly."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if (record := failed()) is not None:
            record(kind, error, trace)

    return hook


def _job_of_all_ranks(store: Any) -> str:
    """Return a unique job name, shared by all ranks through the store."""
    mine = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    # compare_set stores the first rank's proposal, and returns the stored one to all others.
    return str(store.compare_set("mindspeed_dsa/record-collectives", "", mine).decode())


def _stacks() -> dict[str, list[str]]:
    threads = {thread.ident: thread for thread in threading.enumerate()}
    stacks = {}
    for number, frame in sys._current_frames().items():
        thread = threads.get(number)
        if number == threading.get_ident():
            continue
        name = "main" if thread is threading.main_thread() else thread.name if thread else f"thread {number}"
        stacks[name] = _lines(traceback.extract_stack(frame))
    return stacks


def _lines(stack: traceback.StackSummary) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in stack]
