"""Sizes as people read them, down to nothing in GB; which processes run, and which share locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from mindspeed_dsa.runs.files import amount, is_running, lock, try_lock


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 kB"),
        (1_234, "1.23 kB"),
        (999_999, "1000.00 kB"),
        (4_200_000, "4.20 MB"),
        (10**9, "1.00 GB"),
        (1_342_000_000_000, "1342.00 GB"),
    ],
)
def test_amounts(nbytes: int, text: str) -> None:
    assert amount(nbytes) == text


@pytest.mark.skipif(sys.platform != "linux", reason="where nobody waits for a process is asked of Linux")
def test_a_process_that_was_killed_and_not_waited_for_does_not_run() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    assert is_running(child.pid)
    assert is_running(os.getppid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and keeps its number
    os.kill(child.pid, 0)
    assert not is_running(child.pid)
    child.wait()
    assert not is_running(child.pid)


@pytest.mark.parametrize("take", [lock, try_lock])
def test_a_forked_process_does_not_share_a_lock(
    take: Callable[[Path], IO[str] | None], tmp_path: Path
) -> None:
    """What writes a checkpoint may wait for a disk when its job is killed, and has to keep nobody out."""
    held = take(tmp_path / "lock")
    assert held is not None
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(told, 1)
        assert try_lock(tmp_path / "lock") is None  # it is this process's still
        held.close()
        with try_lock(tmp_path / "lock") or pytest.fail("the child holds it"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
