"""One start of a job: its processes, their output, and its progress."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.soak.launcher import end_with

_MARK = "SOAK_ATTEMPT"
"""Environment variable that marks all processes of an attempt. Forks are recognized by their names."""
_NUMBERS = itertools.count()
_POLL_S = 0.02
_LEAVE_S = 20.0
"""Seconds from a launcher's end until all of its processes have ended, on a busy machine."""


class Failure(Exception):
    """A failed check; the message says which."""


@dataclass(frozen=True)
class Printed:
    """Output of one rank in one of a launcher's starts.

    Attributes:
        start: number of the start, from 0.
        rank: local rank.
        text: printed text.
    """

    start: int
    rank: int
    text: str


class Attempt:
    """A launcher and its processes. As a context manager, it leaves no process behind.

    Args:
        command: launcher's command, or a function to run in a fork of this process.
        logs: folder for the output.
        environ: environment of all processes.
        run: folder of the run, without the number that a second run gets.
        patience_s: seconds without a step or a start after which the job counts as hung.
    """

    def __init__(
        self,
        command: Sequence[str] | Callable[[str], int],
        logs: Path,
        environ: Mapping[str, str],
        run: Path,
        patience_s: float,
    ) -> None:
        self.logs, self._run, self._patience_s = logs, run, patience_s
        self._mark = f"{os.getpid():x}.{next(_NUMBERS)}"
        logs.mkdir(parents=True)
        output = logs / "launcher.txt"
        self.launcher = (
            _Forked(lambda: self._launch(command, output))
            if callable(command)
            else self._popen(command, output, environ)
        )
        self._seen: tuple[object, ...] = ()
        self._changed = time.monotonic()

    def _launch(self, command: Callable[[str], int], output: Path) -> None:
        os.environ[_MARK] = self._mark  # for programs that it starts
        end_with(lambda: command(self._mark), self._mark, output)

    def _popen(self, command: Sequence[str], output: Path, environ: Mapping[str, str]) -> psutil.Popen:
        with open(output, "wb") as file:
            return psutil.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**environ, _MARK: self._mark},
                start_new_session=True,
            )

    # -- processes ----------------------------------------------------------------------------------

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the running ranks by number."""
        running = {}
        with contextlib.suppress(psutil.Error):
            for process in self.launcher.children():
                with contextlib.suppress(psutil.Error, ValueError, KeyError):
                    if _runs(process):
                        running[self._rank_of(process)] = process
        return running

    def writers(self) -> list[psutil.Process]:
        """Return the processes that write a checkpoint for a rank."""
        writers = []
        for rank in self.ranks().values():
            with contextlib.suppress(psutil.Error):
                writers += [child for child in rank.children() if _runs(child)]
        return writers

    def everything(self) -> list[psutil.Process]:
        """Return all running processes, including orphans."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self._is_ours(process) and _runs(process):
                    processes.append(process)
        return processes

    def _rank_of(self, process: psutil.Process) -> int:
        # Forks are named MARK.RANK; ranks of torchrun have an environment variable.
        _, forked, rank = process.name().partition(f"{self._mark}.")
        return int(rank if forked else process.environ()["RANK"])

    def _is_ours(self, process: psutil.Process) -> bool:
        name = process.name()
        forked = name == self._mark or name.startswith(f"{self._mark}.")
        return forked or process.environ().get(_MARK) == self._mark

    # -- waiting ------------------------------------------------------------------------------------

    @property
    def code(self) -> int | None:
        """Launcher's exit code; ``None`` while it runs."""
        return self.launcher.poll()

    def wait(self, happened: Callable[[], bool] = lambda: False) -> bool:
        """Wait until ``happened()`` is true; return False if the launcher ends first.

        Raises:
            Failure: the job makes no progress.
        """
        while self.code is None:
            if happened():
                return True
            self._look_for_progress()
            time.sleep(_POLL_S)
        return False

    def wait_for_end_of(self, processes: Sequence[psutil.Process], seconds: float) -> float:
        """Wait until the processes have ended; return the seconds that it took.

        Raises:
            Failure: some still run after ``seconds``.
        """
        begin = time.monotonic()
        while alive := [process for process in processes if _runs(process)]:
            if time.monotonic() - begin > seconds:
                names = ", ".join(str(process.pid) for process in alive)
                raise Failure(f"processes {names} still run {seconds:.0f} s after the disturbance")
            # Reap the launcher, which may be one of the processes.
            self.launcher.poll()
            time.sleep(_POLL_S)
        return time.monotonic() - begin

    def _look_for_progress(self) -> None:
        now = (self.step, len(list(self.logs.glob("*/attempt_*/*/std*.log"))))
        if now != self._seen:
            self._seen, self._changed = now, time.monotonic()
        elif time.monotonic() - self._changed > self._patience_s:
            raise Failure(f"the job made no step for {self._patience_s:.0f} s after step {self.step}")

    def look_for_orphans(self) -> None:
        """Wait until all processes of an ended launcher are gone.

        Raises:
            Failure: some stay.
        """
        end = time.monotonic() + _LEAVE_S
        while left := self.everything():
            if time.monotonic() > end:
                raise Failure(f"processes {', '.join(str(each.pid) for each in left)} outlive their launcher")
            time.sleep(_POLL_S)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes."""
        # Processes may start others until they are dead.
        while everything := self.everything():
            for process in everything:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.launcher.wait()

    # -- files --------------------------------------------------------------------------------------

    @property
    def run(self) -> Path:
        """Folder of the newest run. A job killed before its first checkpoint begins another run."""
        numbers = [
            int(path.name[len(self._run.name) + 1 :])
            for path in self._run.parent.glob(f"{self._run.name}-*")
            if path.name[len(self._run.name) + 1 :].isdigit()
        ]
        return self._run.with_name(f"{self._run.name}-{max(numbers)}") if numbers else self._run

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.run / "checkpoints"

    @property
    def starts(self) -> int:
        """Number of times that the launcher has started ranks."""
        return max((each.start + 1 for each in self.printed()), default=0)

    @property
    def step(self) -> int:
        """Last step of the newest start; 0 before its first."""
        printed = self.printed()
        newest = max((each.start for each in printed), default=0)
        steps = [step for each in printed if each.start == newest for step in steps_in(each.text)]
        return max(steps, default=0)

    def is_saving(self) -> bool:
        """Return whether a checkpoint is being written."""
        return any(self.checkpoints.glob(".iter_*.partial"))

    def printed(self) -> list[Printed]:
        """Return the ranks' output, in the order of starts and ranks."""
        texts: dict[tuple[int, int], str] = {}
        for path in sorted(self.logs.glob("*/attempt_*/*/std*.log")):
            start = int(re.sub(r"\D", "", path.parts[-3]))
            place = start, int(path.parts[-2])
            texts[place] = texts.get(place, "") + path.read_text(errors="replace")
        return [Printed(*place, text) for place, text in sorted(texts.items())]


class _Forked(psutil.Process):
    """A fork of this process that runs a function and ends; has the used methods of ``psutil.Popen``."""

    def __init__(self, what: Callable[[], None]) -> None:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            what()
        super().__init__(pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def wait(self, timeout: float | None = None) -> int | None:
        while self.poll() is None:
            time.sleep(_POLL_S)
        return self._code


def steps_in(text: str) -> list[int]:
    """Return the steps that a rank has printed."""
    return [int(step) for step in re.findall(r"^step +(\d+)/", text, re.MULTILINE)]


def records(run: Path, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    """Return the complete lines of a file with a JSON object per line; the last may be half written."""
    return list(_records(run / name))


def _records(path: Path) -> Iterator[dict[str, float]]:
    with contextlib.suppress(OSError):
        for line in path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
