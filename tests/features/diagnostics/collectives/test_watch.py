"""Watch of a rank: thousands of descriptors, children, files of other processes, a full disk."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mindspeed_dsa.features.diagnostics.collectives import watch
from mindspeed_dsa.runs.files import RunError, try_lock


@pytest.fixture
def high():
    """Return the two ends of a connection, whose descriptors are beyond what ``select`` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("processes may not have so many descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048) if soft > 0 else soft, hard))
    ends = []
    for number, end in enumerate(socket.socketpair(), start=2000):
        ends.append(socket.socket(fileno=os.dup2(end.detach(), number)))
    yield ends
    for end in ends:
        end.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_of_large_jobs_are_waited_for(high):
    mine, other = high
    assert watch._ready([mine], 0.05) == []
    other.sendall(b"a word")
    assert mine in watch._ready([mine], 0.05)
    other.close()
    assert mine in watch._ready([mine], 0.05)


@pytest.mark.parametrize(
    "text", ['{"job": "%(pid)s", "pid": 1}', '{"job": "a", "pid": %(pid)s7}', "", "%(pid)s"]
)
def test_a_file_that_another_process_holds_is_not_taken_for_ones_own(tmp_path, text):
    """Numbers of processes are short in containers, and part of many a word."""
    rank = object.__new__(watch.Watch)
    rank._folder, rank._alive, rank._job, rank._rank = tmp_path, tmp_path, "mine", 0
    rank._file = tmp_path / "00000"
    held = try_lock(rank._file)
    rank._file.write_text(text % {"pid": os.getpid()})
    with pytest.raises(RunError, match="another job's rank 0 records there; name a folder of this job's own"):
        rank._say_alive()
    assert rank._file.read_text() == text % {"pid": os.getpid()}
    rank._file.write_text(json.dumps({"job": "earlier", "pid": os.getpid()}))  # an earlier session's
    with rank._say_alive():
        assert json.loads(rank._file.read_text())["job"] == "mine"
    held.close()


def test_a_full_disk_is_refused_in_one_line(tmp_path):
    rank = object.__new__(watch.Watch)
    rank._folder, rank._alive, rank._job, rank._rank = tmp_path, tmp_path, "mine", 0
    rank._file = tmp_path / "00000"
    rank._file.symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"cannot be written to \(.*\); name another folder"):
        rank._say_alive()


@pytest.mark.parametrize(
    "error", ["DataLoader worker (pid 7) is killed by signal: Terminated. ", "a bad batch"]
)
def test_what_follows_a_loss_is_recorded_and_not_printed(monkeypatch, error):
    """``torchrun`` ends the workers of a data loader beside their rank: its handler raises in any line."""

    def raises(number, frame):
        raise RuntimeError("DataLoader worker (pid 8) is killed by signal: Terminated. ")

    recorded, printed = [], []
    rank = object.__new__(watch.Watch)
    rank._lost, rank._rank, rank._previous_hook = {"1": "killed"}, 0, lambda *parts: printed.append(parts)
    rank._look_for_lost = rank.stop = lambda: None
    rank._ask = lambda reason: (os.kill(os.getpid(), signal.SIGCHLD), recorded.append(reason))
    before = signal.signal(signal.SIGCHLD, raises)
    try:
        rank._failed(RuntimeError, RuntimeError(error), None)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert recorded == [f"failed with RuntimeError: {error}"]
    assert printed == []


def test_two_threads_that_notice_a_loss_at_once_both_record_it(monkeypatch, tmp_path):
    """The main one, its connection broken, and the watch's: neither takes the other's unfinished file."""
    recorded = []
    rank = object.__new__(watch.Watch)
    rank._rank, rank._lost, rank._failure = 0, {"1": "killed"}, None
    rank._request, rank._writing = tmp_path / ".request", threading.Lock()
    rank._write = recorded.append
    monkeypatch.setattr(os, "fsync", lambda descriptor: time.sleep(0.05))
    reasons = ["rank 1 died", "failed with RuntimeError: Connection reset by peer"]
    with ThreadPoolExecutor() as threads:
        list(threads.map(rank._ask, reasons))
    assert sorted(recorded) == sorted(reasons)
