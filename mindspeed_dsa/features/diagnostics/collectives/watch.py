"""Watch of a rank: writes its record when something is wrong, and ends a job that has lost a rank.

A thread does all of it, since the main one waits in a collective then, outside of Python. Ranks tell each
other through the folder. Each holds a lock on a file in it for as long as it lives: where the lock is free
and the file is there, the process was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
import weakref
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Protocol

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mindspeed_dsa.features.diagnostics.collectives.feature import Options
from mindspeed_dsa.features.diagnostics.collectives.ring import Ring, boot
from mindspeed_dsa.log import Log
from mindspeed_dsa.runs import collectives as files
from mindspeed_dsa.runs.files import RunError, try_lock, write_atomically

_PERIOD_S = 1.0
"""Each rank then asks the file system about two files: of thousands, it may be one that all share."""
_FIRST_S = 0.05
"""Until the first look; each of the next ones comes after twice as long, up to the period. A look connects
this rank to the next, whose end on another machine is not noticed before."""
_GRACE_S = 10.0
"""From the loss of a rank to the end of the others, for launchers and handlers that end them better."""
_CLOSING_S = 0.2
"""The kernel closes a killed process's connections and its lock one after the other."""
_PATIENCE_S = 5.0
"""For the cause of a broken connection to be known."""
_BROKEN = (
    *("connection", "socket", "broken pipe", "gloo", "nccl", "hccl", "timed out", "timeout"),
    "killed by signal: terminated",  # a data loader's worker, by who ends the job
)
"""Words in errors of a rank that is not to blame."""


class Recorded(Protocol):
    """The part of a recorder that is watched."""

    changed: float

    def place(self) -> str:
        """Return where the schedule stands, in words."""

    def groups(self) -> tuple[files.Group, ...]:
        """Return everything that is recorded."""


class Watch:
    """Thread of one rank.

    Args:
        options: of the feature.
        log: of the feature.
        recorder: what is written.
    """

    def __init__(self, options: Options, log: Log, recorder: Recorded) -> None:
        self._folder, self._silence_s = options.folder.absolute(), options.silence_s
        self._log = log
        # Sessions and groups end without a word where nothing of them is patched any more.
        self._recorder, self._world = weakref.ref(recorder), weakref.ref(dist.group.WORLD)
        self._rank, self._ranks, self._host = dist.get_rank(), dist.get_world_size(), socket.gethostname()
        store: Any = dist.distributed_c10d._get_default_store()
        self._job = _job_of_all_ranks(store)
        self._lost: dict[str, str] = {}
        self._ends_at: float | None = None
        self._silent_since = 0.0
        self._process = os.getpid()
        # By machine: a lock says nothing about another's processes on many network file systems.
        self._alive = self._folder / ".alive" / f"{self._host}-{boot()}"
        self._file = self._alive / f"{self._rank:05d}"
        self._lock = self._say_alive()
        self._ring = Ring(store, self._job, self._rank, self._ranks, self._host, os.getpid())
        self._request = self._folder / f".request-{self._job}"
        self._seen = 0
        self._writing = threading.Lock()  # the main thread, which has failed, and this one's
        self._failure: tuple[str, list[str]] | None = None
        self._stopped = threading.Event()
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._earlier: int | None = None
        self._take_signals()
        self._previous_hook, sys.excepthook = sys.excepthook, self._failed
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._leave_child)
        self._thread = threading.Thread(target=self._watch, name="record-collectives", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: this rank leaves of its own accord."""
        if self._stopped.is_set() or os.getpid() != self._process:
            return
        self._stopped.set()
        atexit.unregister(self.stop)
        if self._owns_file():
            with contextlib.suppress(OSError):
                self._file.unlink()
        self._lock.close()
        self._ring.leave()
        self._restore_signals()
        if sys.excepthook == self._failed:
            sys.excepthook = self._previous_hook

    def _leave_child(self) -> None:
        """Take from a forked child what is this process's: the lock, and the signals' way to the thread."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._lock.close()
        self._ring.close()
        self._restore_signals()
        sys.excepthook = self._previous_hook

    # -- what makes it write ----------------------------------------------------------------------

    def _watch(self) -> None:
        period_s = _FIRST_S
        while not self._stopped.is_set():
            try:
                ready = _ready([self._woken, *self._ring.waited_for()], period_s)
                period_s = min(2 * period_s, _PERIOD_S)
                for number in os.read(self._woken, 64) if self._woken in ready else b"":
                    self._signalled(number)
                if self._stopped.is_set():
                    return
                if self._is_over():
                    self.stop()
                    return
                self._look()
                self._listen(ready)
            except Exception as error:  # neither a full file system nor a defect here ends training
                # The main thread, which stops it, closes connections under this one's hands.
                if self._stopped.is_set():
                    return
                self._log.warning("%s gets no records: %r", self._folder, error, once=True)
                time.sleep(_PERIOD_S)

    def _is_over(self) -> bool:
        """Return whether session or groups are gone, or a later session of this process has the folder."""
        world = self._world()
        if self._recorder() is None or world is None or dist.group.WORLD is not world:
            return True
        return not self._owns_file()

    def _owns_file(self) -> bool:
        with contextlib.suppress(OSError):
            return self._file.stat().st_ino == os.fstat(self._lock.fileno()).st_ino
        return False

    def _look(self) -> None:
        """Answer the others, look for those that are gone, and for silence."""
        with contextlib.suppress(FileNotFoundError):
            changed = self._request.stat().st_mtime_ns
            if changed != self._seen:
                self._seen = changed
                asked = json.loads(self._request.read_text(encoding="utf-8"))
                self._lose(asked["lost"])
                if asked["rank"] != self._rank:
                    self._write(f"rank {asked['rank']}: {asked['reason']}")
        self._look_for_lost()
        self._notice_silence()
        if self._ends_at is not None and time.monotonic() > self._ends_at:
            self.stop()
            os._exit(1)

    def _listen(self, ready: list[Any]) -> None:
        """Hear of ranks that are gone, of other machines too; what is known of this one is more exact."""
        try:
            self._ring.connect()
        except OSError as error:
            self._log.warning(
                "the next rank cannot be reached (%s): if it ends on another machine, this one hears of that "
                "only if both share %s; let the machines of the job connect to each other on any port",
                error,
                self._folder,
                ranks="all",
            )
        lost = self._ring.listen(ready)
        if lost:
            self._look_for_lost()
            if lost.keys() - self._lost.keys():
                time.sleep(_CLOSING_S)
                self._look_for_lost()
            if news := {rank: why for rank, why in lost.items() if rank not in self._lost}:
                self._lose(news)
                self._ask(f"rank {next(iter(news))} died")

    def _notice_silence(self) -> None:
        recorder = self._recorder()
        changed_s = 0.0 if recorder is None else recorder.changed
        quiet_s = time.time() - changed_s
        if quiet_s <= self._silence_s or self._silent_since == changed_s:
            return
        self._silent_since = changed_s
        # Where another has asked since then, this rank has answered.
        if self._seen < changed_s * 1e9:
            self._ask(f"no collective has started or ended for {quiet_s:.0f} s")

    def _look_for_lost(self) -> None:
        for file in self._alive.iterdir():
            rank = file.name.lstrip("0") or "0"
            if file == self._file or rank in self._lost:
                continue
            with contextlib.suppress(FileNotFoundError, ValueError):  # it has left, or is about to arrive
                other = self._killed(file)
                if other is not None:
                    killed = f"process {other['pid']} on {self._host} was killed, as by SIGKILL"
                    self._lose({rank: f"{killed} or where memory ran out"})
                    self._ask(f"rank {rank} died")

    def _killed(self, file: Path) -> dict[str, Any] | None:
        """Return what a rank's file says, if its process has ended without removing it."""
        with open(file, encoding="utf-8") as opened:
            other: dict[str, Any] = json.load(opened)
            if other["job"] != self._job:
                return None
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            # Who leaves removes the file first and unlocks it then.
            return other if file.stat().st_ino == os.fstat(opened.fileno()).st_ino else None

    def _lose(self, lost: dict[str, str]) -> None:
        for rank, why in lost.items():
            if rank in self._lost:
                continue
            self._lost[rank] = why
            self._ends_at = self._ends_at or time.monotonic() + _GRACE_S
            if rank != str(self._rank):
                self._say_once(rank, why)
        if lost:
            self._ring.tell(self._lost)

    def _say_once(self, rank: str, why: str) -> None:
        """Print what happened to a rank, on the first of the others that knows."""
        recorder = self._recorder()
        place = "" if recorder is None else recorder.place()
        stood = f"rank {self._rank} is in {place}; " if place else ""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._folder / f".said-{self._job}-{rank}", os.O_CREAT | os.O_EXCL))
            print(
                f"mindspeed_dsa: rank {rank} is gone: {why}; {stood}the other ranks end within "
                f"{_GRACE_S:.0f} s. "
                f"What each of them waited for: python -m mindspeed_dsa hang {self._folder}",
                file=sys.stderr,
                flush=True,
            )

    def _take_signals(self) -> None:
        """Hear signals in the thread, too: handlers of Python wait for the main one."""
        if threading.current_thread() is not threading.main_thread():
            self._log.warning("signals write nothing: the first collective was not the main thread's")
            return
        for number in (signal.SIGUSR1, signal.SIGTERM):
            if signal.getsignal(number) == signal.SIG_DFL or _is_ours(signal.getsignal(number)):
                signal.signal(number, self._heard)
        self._earlier = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def _restore_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread() or self._earlier is None:
            return
        signal.set_wakeup_fd(self._earlier)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            if signal.getsignal(number) == self._heard:
                signal.signal(number, signal.SIG_DFL)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """Leave a signal to the thread, unless that has ended, and could not restore the handlers."""
        if self._stopped.is_set():
            signal.signal(number, signal.SIG_DFL)
            if number == signal.SIGTERM:
                os.kill(os.getpid(), number)

    def _signalled(self, number: int) -> None:
        if self._earlier is not None and self._earlier >= 0:
            with contextlib.suppress(OSError):
                os.write(self._earlier, bytes([number]))
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            self._ask(name)
        elif number == signal.SIGTERM:
            self._look_for_lost()
            self._write(name)
            if signal.getsignal(number) == self._heard:
                self.stop()
                # signal.signal() is for the main thread alone, which may wait outside of Python.
                ctypes.pythonapi.PyOS_setsig(number, ctypes.c_void_p(None))
                os.kill(os.getpid(), number)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Take the place of ``sys.excepthook``: say what came first, here or elsewhere."""
        text = f"{kind.__name__}: {error}"
        self._failure = f"failed with {text}", _lines(traceback.extract_tb(trace))
        if threading.current_thread() is threading.main_thread():
            # torchrun ends workers of data loaders too, whose handler raises wherever this process stands.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        to_blame = not self._lost and not any(word in text.lower() for word in _BROKEN)
        with contextlib.suppress(OSError):
            if to_blame:
                self._lose({str(self._rank): f"it failed with {text}"})
            else:
                self._wait_for_cause()
            self._ask(self._failure[0])
        if to_blame or not self._lost:
            self._previous_hook(kind, error, trace)
        self.stop()

    def _wait_for_cause(self) -> None:
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            self._look_for_lost()
            if self._lost:  # or the thread has heard of it
                return
            time.sleep(_PERIOD_S / 5)

    # -- writing ----------------------------------------------------------------------------------

    def _ask(self, reason: str) -> None:
        """Write this rank's record, and have the others write theirs."""
        asked = {"rank": self._rank, "reason": reason, "lost": self._lost}
        with self._writing:
            write_atomically(self._request, json.dumps(asked))
        self._write(reason)
        if self._failure is None and not self._lost:  # else there is a better line
            self._log.warning("%s: see python -m mindspeed_dsa hang %s", reason, self._folder)

    def _write(self, reason: str) -> None:
        recorder = self._recorder()
        if recorder is None:
            return
        stacks = _stacks()
        if self._failure is not None:  # what comes later is its consequence
            reason, stacks["main"] = self._failure
        record = files.Record(
            self._job,
            self._rank,
            self._ranks,
            self._host,
            os.getpid(),
            time.time(),
            reason,
            dict(self._lost),
            recorder.place(),
            stacks,
            recorder.groups(),
            self._write_torchs(),
        )
        with self._writing:
            files.write(self._folder, record)

    def _write_torchs(self) -> str:
        """Write what torch's own recorder has, which knows the device's progress; its analyser reads it."""
        dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
        if dump is None:
            return ""
        folder = self._folder / "torch"
        folder.mkdir(exist_ok=True)
        file = folder / f"rank_{self._rank}"
        file.write_bytes(dump(True, False, False))  # with stacks it may take minutes
        return str(file.relative_to(self._folder))

    def _is_of_this_process(self) -> bool:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # who has it is about to write into it
            return bool(json.loads(self._file.read_text(encoding="utf-8"))["pid"] == os.getpid())
        return False

    def _say_alive(self) -> IO[str]:
        """Hold the lock on this rank's file, until the process ends in whatever way."""
        try:
            self._alive.mkdir(parents=True, exist_ok=True)
            lock = try_lock(self._file)
            if lock is None and self._is_of_this_process():
                self._file.unlink()  # an earlier session of this process, which ends when it sees that
                lock = try_lock(self._file)
            if lock is not None:
                os.ftruncate(lock.fileno(), 0)
                os.write(lock.fileno(), json.dumps({"job": self._job, "pid": os.getpid()}).encode())
        except OSError as error:
            raise RunError(
                f"--record-collectives {self._folder} cannot be written to ({error}); name another folder"
            ) from None
        if lock is None:
            raise RunError(
                f"--record-collectives {self._folder}: another job's rank {self._rank} records there; "
                "name a folder of this job's own"
            )
        return lock


def _ready(waited_for: list[Any], period_s: float) -> list[Any]:
    """Wait for one that can be read; ``select`` refuses descriptors from 1024 on, which large jobs have."""
    by_number = {each if isinstance(each, int) else each.fileno(): each for each in waited_for}
    poll = select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(1000 * period_s)]


def _is_ours(handler: Any) -> bool:
    return getattr(handler, "__func__", None) is Watch._heard


def _job_of_all_ranks(store: Any) -> str:
    """Return a name that all ranks of a job agree on, whoever of them is the first, and no other job has."""
    mine = uuid.uuid4().hex[:12]
    return str(store.compare_set("mindspeed_dsa/record-collectives", "", mine).decode())


def _stacks() -> dict[str, list[str]]:
    known = {thread.ident: thread for thread in threading.enumerate()}
    found = {}
    for number, frame in sys._current_frames().items():
        thread = known.get(number)
        if number == threading.get_ident():
            continue
        name = "main" if thread is threading.main_thread() else thread.name if thread else f"thread {number}"
        found[name] = _lines(traceback.extract_stack(frame))
    return found


def _lines(stack: traceback.StackSummary) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in stack]
