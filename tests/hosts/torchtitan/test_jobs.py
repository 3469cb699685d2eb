"""Ranks of jobs end with their job, whatever ends it."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from tests.hosts.torchtitan import jobs

RANK_1_FAILS = """
import os, pathlib, sys, time
pathlib.Path(os.environ["RANK"]).write_text(str(os.getpid()))
while not (pathlib.Path("0").exists() and pathlib.Path("1").exists()):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    sys.exit("rank 1 fails")
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_or_late_job_leaves_neither_ranks_nor_descriptors(tmp_path, monkeypatch, late):
    (tmp_path / "program.py").write_text(RANK_1_FAILS)
    jobs.start(tmp_path, 1, ["--version"], module="platform")  # the server has its own descriptors
    before = len(os.listdir("/proc/self/fd"))
    if late:
        monkeypatch.setattr(jobs.select, "select", lambda *args: time.sleep(1) or ([], [], []))
        with pytest.raises(subprocess.TimeoutExpired):
            jobs.start(tmp_path, 2, [], module="program")
    else:
        done = jobs.start(tmp_path, 2, [], module="program")
        assert (done.returncode, done.stderr) == (1, "rank 1 fails\n")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(is_alive(int(file.read_text())) for file in map(tmp_path.joinpath, "01") if file.exists())


def test_no_rank_asks_the_hub(tmp_path):
    # The variable is read when the package is imported: in the server, if the environment has TorchTitan.
    (tmp_path / "program.py").write_text("from huggingface_hub.constants import *; print(HF_HUB_OFFLINE)")
    done = jobs.start(tmp_path, 1, [], module="program")
    assert (done.returncode, done.stdout) == (0, "True\n")
