"""Human-readable sizes, temporary names, running processes, and locks of a single writer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from mindspeed_dsa.runs import files
from mindspeed_dsa.runs.files import (
    RunError,
    Sole,
    amount,
    beside,
    is_running,
    lock,
    try_lock,
    write_atomically,
    written,
)


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


def test_two_containers_of_one_name_and_number_write_their_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First processes of containers have equal numbers, and may share a host name and a folder."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    path = tmp_path / "state.json"
    with written(path) as first:
        first.write(b"first, whole")
        write_atomically(path, "second")
        assert path.read_text() == "second"
    assert path.read_text() == "first, whole"
    assert os.listdir(tmp_path) == ["state.json"]
    name = beside(path).name
    assert name.startswith(".state.json.node-1.")
    assert name.endswith(".partial")
    assert beside(path).name != name


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "state.json", "text")
    assert os.listdir(tmp_path) == []


HOLD = """
import sys
from pathlib import Path
from mindspeed_dsa.runs.files import Sole

sole = Sole(Path(sys.argv[1]), "it")
print("held", flush=True)
sys.stdin.read()
"""


WITHOUT_LOCKS = """
import errno, fcntl

def flock(*args):
    raise OSError(errno.ENOLCK, "No locks available")

fcntl.flock = flock
"""


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    path = tmp_path / "new" / ".model.lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match=f"out is being written by process {other.pid} on .*wait until"):
            Sole(path, "out")
        other.kill()
    sole = Sole(path, "out")  # the file of a killed writer keeps no other out
    with pytest.raises(RunError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        Sole(path, "out")
    sole.end()
    sole.end()
    assert not path.exists()
    Sole(path, "out").end()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, taken = tmp_path / ".model.lock", try_lock
    times: list[int] = []

    def slow(at: Path) -> IO[str] | None:
        held = taken(at)
        times.append(1)
        if len(times) == 1:
            path.unlink()  # by the writer that has just ended
        return held

    monkeypatch.setattr(files, "try_lock", slow)
    sole = Sole(path, "out")
    assert len(times) == 2
    with pytest.raises(RunError, match="is being written"):
        Sole(path, "out")
    sole.end()


def no_locks(descriptor: int, operation: int) -> None:
    """Fail as ``flock`` does on a file system without locks."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_without_locks_a_second_writer_is_refused_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / "new" / ".model.lock"
    held = path.with_name(".model.lock.held")
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_LOCKS + HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(
            RunError, match=f"by process {other.pid} on .*, as {held} says; wait .*delete the file: {held}$"
        ):
            Sole(path, "out")
        other.kill()
        # The process has ended, and stays a zombie until its parent waits for it.
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        sole = Sole(path, "out")
    with pytest.raises(RunError, match=f"by process {os.getpid()} on "):
        Sole(path, "out")
    sole.end()
    sole.end()
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, True),
        ({"started": "1"}, sys.platform != "linux"),  # the number was reused
        ({"started": ""}, True),
        ({"where": "another machine"}, True),
        (None, True),
    ],
    ids=["runs", "number again", "beginning unknown", "elsewhere", "not written to its end"],
)
def test_without_locks_only_what_a_process_from_here_has_left_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str] | None, refused: bool
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    path, held = tmp_path / ".model.lock", tmp_path / ".model.lock.held"
    first = Sole(path, "out")
    theirs = "" if changed is None else json.dumps({**json.loads(held.read_text()), **changed})
    held.write_text(theirs)
    if refused:
        with pytest.raises(RunError, match=f"out is being written by .*, as {held} says"):
            Sole(path, "out")
        assert held.read_text() == theirs
    else:
        Sole(path, "out").end()
        assert not held.exists()
    held.write_text("of another, after somebody has deleted the first one's")
    first.end()
    assert held.exists()


def test_without_locks_one_of_two_successors_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one reads the ended writer's name before the other one writes its own."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    path, held = tmp_path / ".model.lock", tmp_path / ".model.lock.held"
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_LOCKS + HOLD, str(path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.kill()
    running, faster = files.is_running, list[Sole]()

    def slow(pid: int) -> bool:
        if not faster:
            faster.append(None)  # type: ignore[arg-type]
            faster[0] = Sole(path, "out")
        return running(pid)

    monkeypatch.setattr(files, "is_running", slow)
    with pytest.raises(RunError, match=f"by process {os.getpid()} on "):
        Sole(path, "out")
    assert held.exists()
    faster[0].end()
    assert os.listdir(tmp_path) == []


def test_without_locks_the_refusal_says_what_a_job_killed_elsewhere_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine cannot know whether a process on another machine still runs."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    path, held = tmp_path / ".model.lock", tmp_path / ".model.lock.held"
    held.write_text(
        json.dumps({"who": "process 7 on node-a", "pid": 7, "started": "1", "where": "node-a", "id": "x"})
    )
    os.utime(held, (0, 0))  # the file is as old as its job, which may run for months
    with pytest.raises(RunError, match=rf"process 7 on node-a, .* killed on another machine .*: {held}$"):
        Sole(path, "out")
    held.unlink()
    Sole(path, "out").end()


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
    """A forked writer may outlive its killed job, and must not keep the lock."""
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
        assert try_lock(tmp_path / "lock") is None  # this process still holds it
        held.close()
        with try_lock(tmp_path / "lock") or pytest.fail("the child holds it"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
