"""Replacement of torchrun on one machine, with ranks that start with everything imported.

The soak imports torch, Megatron and the job once. A launcher and its ranks are forks of it and start at once,
where torchrun needs ten seconds of a core per process. They are told apart by their names.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.soak.layouts import ROOT, Command, Layout, Place, environment, flags
from tests.support.ports import free_port

_SET_NAME = 15  # PR_SET_NAME of <linux/prctl.h>
_POLL_S = 0.02
_GRACE_S = 30.0  # torchrun's, from SIGTERM to SIGKILL


def forks(job: Callable[[Layout, Place], int]) -> Command:
    """Return a factory of launchers with ranks that are forks of this process.

    Args:
        job: function that runs a rank and returns its exit code.
    """

    def command(layout: Layout, place: Place, restarts: int) -> Callable[[str], int]:
        def run(name: str) -> int:
            port = ""

            def start(rank: int, file: Path) -> int:
                nonlocal port
                # All ranks of a start share a free port, which the first one chooses.
                port = port if rank else str(free_port())
                pid = os.fork()
                if pid == 0:
                    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
                    os.environ.update(WORLD_SIZE=str(layout.ranks), LOCAL_WORLD_SIZE=str(layout.ranks))
                    os.environ["MASTER_ADDR"] = "127.0.0.1"
                    end_with(lambda: job(layout, place), f"{name}.{rank}", file)
                return pid

            return launch(layout.ranks, place.logs, restarts, start)

        return run

    return command


def prepare() -> None:
    """Import everything that the job imports, before any thread exists."""
    os.environ.update(environment())
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    from tests.support import sources

    sources.parse_once()
    sources.check_all()
    from mindspeed_dsa import session

    session.enable_from_argv(["--experimental-attention-variant", "dsa"])
    import torch
    import torch._dynamo  # noqa: F401 - what the first optimizer imports
    from dsa_job import app, training  # noqa: F401


def example_job(layout: Layout, place: Place) -> int:
    """Run a rank of the example job after :func:`prepare`; return its exit code."""
    from dsa_job.app import main

    from mindspeed_dsa import session

    argv = flags(layout, place)
    session.enable_from_argv(argv)  # as the one-liner does
    return main(argv)


def launch(ranks: int, logs: Path, restarts: int, start: Callable[[int, Path], int]) -> int:
    """Start ranks, and end all when one ends; restart them after a failure. Return 0 on success.

    Args:
        ranks: number of ranks.
        logs: folder for their output.
        restarts: number of restarts after failures.
        start: function that starts a rank as a child process, printing into a file; returns its process id.
    """
    started: list[int] = []

    def leave(*_: object) -> None:
        _end(started)
        os._exit(1)

    signal.signal(signal.SIGTERM, leave)
    for attempt in range(restarts + 1):
        files = [logs / "forks" / f"attempt_{attempt}" / str(rank) / "stdout.log" for rank in range(ranks)]
        for file in files:
            file.parent.mkdir(parents=True)
        started[:] = [start(rank, file) for rank, file in enumerate(files)]
        left = set(started)
        while left:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in left:
                left.discard(pid)
                # One failure ends the start: the other ranks are terminated below.
                if status:
                    break
            elif not pid:
                time.sleep(_POLL_S)
        else:
            return 0
        _end(list(left))
    return 1


def _end(pids: list[int]) -> None:
    """Send SIGTERM to processes, and SIGKILL after torchrun's grace period."""
    left, until = set(pids), time.monotonic() + _GRACE_S
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while left:
        with contextlib.suppress(ChildProcessError):
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        if time.monotonic() > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def end_with(function: Callable[[], int], name: str, output: Path) -> None:
    """Run a function in this forked process, then exit as the interpreter does.

    Args:
        function: function that returns the exit code.
        name: name of the process.
        output: file for its output.
    """
    code = 1
    try:
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(descriptor, number)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        code = function()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    # os._exit() skips these parts of the interpreter's exit.
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)
