"""Files that hold either the old or the new content, whenever the process is killed."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import weakref
from pathlib import Path
from typing import IO

from mindspeed_dsa.patches.errors import MindSpeedDSAError

_locks: weakref.WeakSet[IO[str]] = weakref.WeakSet()
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


class RunError(MindSpeedDSAError):
    """Files that cannot be used; the message names them and says what to do."""


def number(text: str) -> int | None:
    """The number that a text consists of; ``None`` unless it is made of up to 18 of the digits 0 to 9."""
    # str.isdigit accepts digits of every script, some of which int() refuses.
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def amount(nbytes: int) -> str:
    """Return bytes in GB, or in MB or kB where they are fewer, as people read them."""
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes / 1000:.2f} kB"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one step; it is on disk when this returns."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """:func:`sync` for everything below a folder."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def is_running(pid: int) -> bool:
    """Return whether a process of this machine runs.

    One that was killed, and that nobody has waited for, does not: where a container's first process waits for
    no orphans, it has its number for ever.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return status(pid)[:1] != ["Z"]


def status(pid: int) -> list[str]:
    """Return what ``/proc/PID/stat`` says of a process from its state on; nothing where that cannot be asked.

    The fields are those of proc_pid_stat(5), the third first.
    """
    with contextlib.suppress(OSError):  # it has ended, or this is not Linux
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def lock(path: Path) -> IO[str]:
    """Wait for the lock on a file; it is held until the result is closed or the process ends.

    A forked process does not share it: one that cannot be killed at once, because it waits for a disk, would
    keep the job's successor out.
    """
    file = open(path, "a")  # noqa: SIM115 - the caller closes it
    _locks.add(file)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def try_lock(path: Path) -> IO[str] | None:
    """:func:`lock` without waiting; ``None`` if another process holds it."""
    file = open(path, "a")  # noqa: SIM115 - the caller closes it
    _locks.add(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _leave_locks() -> None:
    for file in list(_locks):
        file.close()


os.register_at_fork(after_in_child=_leave_locks)


def end_with_parent(parent: int) -> bool:
    """Have this process killed when the one that has started it ends, in whatever way; on Linux alone.

    A writer that outlives its job shares the files and pipes of the one that follows.

    Args:
        parent: number of the process whose main thread has started this one.

    Returns:
        Whether it still runs: else nobody is left for whom to do anything.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    return os.getppid() == parent
