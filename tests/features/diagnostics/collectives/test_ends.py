"""Recording does not change how a process ends: signals act at once, with or without a writable folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from mindspeed_dsa.__main__ import main
from tests.features.diagnostics.collectives.ending import ENDS


def begin(folder, way: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.features.diagnostics.collectives.ending", str(folder), way]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> str:
    """Wait for the process; return all its output."""
    try:
        said, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    return said + errors


@pytest.fixture
def terminated(tmp_path):
    """Return a function that ends a waiting process with SIGTERM and returns its exit code."""

    def run(way: str) -> int:
        process = begin(tmp_path / "records", way)
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            time.sleep(0.2)  # gives the process time to start waiting
            process.send_signal(signal.SIGTERM)
            return process.wait(timeout=60)
        finally:
            process.kill()

    return run


@pytest.mark.full
@pytest.mark.parametrize("way", ["another wakeup", "gone", "unwritable", "full"])
def test_sigterm_ends_a_rank_that_waits(terminated, way):
    assert terminated(way) == -signal.SIGTERM


def test_a_rank_that_sigterm_ends_leaves_its_record(terminated, tmp_path, capsys):
    assert terminated("waits") == -signal.SIGTERM
    assert main(["hang", str(tmp_path / "records")]) == 0
    text = capsys.readouterr().out
    assert "rank 0 wrote because of: SIGTERM" in text
    assert re.search(r"rank 0 stands in after all_reduce, .*ending.py:\d+ wait: store.wait", text), text


@pytest.mark.full
def test_a_handler_of_sigterm_runs_as_without_records(terminated):
    # A main thread that waits for a lock would restart the system call, and wait for ever.
    assert terminated("handled") == 7
    assert terminated("handled before") == 7


@pytest.mark.full
@pytest.mark.parametrize("way", ENDS)
def test_a_rank_that_ends_well_leaves_nothing(tmp_path, way):
    # A forked child must not report a killed rank, and a destroyed group must not stay alive.
    process = begin(tmp_path / "records", way)
    said = end(process)
    assert process.returncode == 0, said
    assert "hang" not in said
    assert not list((tmp_path / "records").iterdir())


@pytest.mark.full
def test_a_rank_that_fails_leaves_its_record(tmp_path, capsys):
    folder = tmp_path / "records"
    process = begin(folder, "failed")
    said = end(process)
    assert process.returncode == 1
    assert "ValueError: a bad batch" in said
    assert main(["hang", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "rank 0 wrote because of: failed with ValueError: a bad batch" in text
    assert "It began with rank 0." in text
    assert not list(folder.glob("*/live-*"))


@pytest.mark.full
def test_a_forked_rank_that_ends_well_ends_nobody_else(tmp_path):
    process = begin(tmp_path / "records", "forked rank")
    said = end(process)
    assert process.returncode == 0, said
    assert "killed" not in said
