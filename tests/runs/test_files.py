"""Sizes as people read them, down to those that are nothing in GB; and which processes run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mindspeed_dsa.runs.files import amount, is_running


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
