"""Files that hold either the old or the new content, whenever the process is killed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import signal
import socket
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mindspeed_dsa.patches.errors import MindSpeedDSAError

_locks: weakref.WeakSet[IO[str]] = weakref.WeakSet()
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_SHOWN = 200  # characters of a file that a message repeats


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


def writer() -> str:
    """Return who writes, other at every call: a part of temporary names in folders that machines share.

    Containers may have the same process numbers, and even the same name.
    """
    return f"{socket.gethostname()}-{os.getpid()}.{uuid.uuid4().hex[:12]}"


def beside(path: Path, end: str = "partial") -> Path:
    """Return a hidden name in a file's folder that no other writer has."""
    return path.with_name(f".{path.name}.{writer()}.{end}")


@contextlib.contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write, which gets its name in one step, and is on disk then; an error leaves nothing."""
    unfinished = beside(path)
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one step; it is on disk when this returns."""
    with written(path) as file:
        file.write(text.encode("utf-8"))


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


def sweep(folder: Path) -> None:
    """Delete what killed writers have left below a folder that nobody else writes to."""
    for left in folder.rglob("*.partial"):
        left.unlink(missing_ok=True)


class Sole:
    """The only writer of something, by a lock that ends with its process; a file beside says who it is.

    On a file system without locks nobody is kept out: there names of :func:`beside` have to do.

    Args:
        path: of the file, which is there while something is written.
        what: is written; begins the message.

    Raises:
        RunError: another process writes it.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._made_folder = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._take(what)

    def _take(self, what: str) -> IO[str] | None:
        while True:
            try:
                lock = try_lock(self._path)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return None
                raise
            if lock is None:
                raise RunError(
                    f"{what} is being written by {self._holder()}; wait until it has ended, or name another "
                    "folder"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(self._path)):
                    break
            lock.close()  # of a file that whoever had it has just removed
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        return lock

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            text = self._path.read_text(encoding="utf-8", errors="replace")[:_SHOWN]
            if text and text.isprintable():
                return text
        return "another process"

    def end(self) -> None:
        """Let others write; called again it does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._path.unlink(missing_ok=True)
            lock.close()
        if self._made_folder:
            with contextlib.suppress(OSError):  # something was written, or it is gone
                self._path.parent.rmdir()


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
