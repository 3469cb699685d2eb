"""Atomic file writes, and locks. If the process is killed, a file has its old or its new content."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

from mindspeed_dsa.patches.errors import MindSpeedDSAError

_locks: weakref.WeakSet[IO[str]] = weakref.WeakSet()
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_SHOWN = 200  # characters of a file that a message repeats


class RunError(MindSpeedDSAError):
    """Error for unusable files; the message names them and the remedy."""


def number(text: str) -> int | None:
    """Parse a text of 1 to 18 digits (0 to 9); return ``None`` for any other text."""
    # str.isdigit accepts digits of every script, some of which int() refuses.
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def amount(nbytes: int) -> str:
    """Format a number of bytes in GB, MB or kB."""
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes / 1000:.2f} kB"


def writer() -> str:
    """Return a name that is unique to this writer, for temporary file names in shared folders."""
    # Containers may have equal process ids and even equal host names.
    return f"{socket.gethostname()}-{os.getpid()}.{uuid.uuid4().hex[:12]}"


def beside(path: Path, end: str = "partial") -> Path:
    """Return a unique hidden path next to a file."""
    return path.with_name(f".{path.name}.{writer()}.{end}")


@contextlib.contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path`` atomically and is synced to disk; an error leaves no file."""
    unfinished = beside(path)
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)  # atomic; the content must be on disk before
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content atomically and sync it to disk."""
    with written(path) as file:
        file.write(text.encode("utf-8"))


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Call :func:`sync` on everything below a folder."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def is_running(pid: int) -> bool:
    """Return whether a process of this machine is running; zombies are not."""
    # In a container whose first process does not reap orphans, a killed process keeps its id forever.
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's process
    return status(pid)[:1] != ["Z"]


def status(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third (proc_pid_stat(5)) on; empty if unavailable."""
    with contextlib.suppress(OSError):  # the process has ended, or this is not Linux
        # The second field, the command in parentheses, may contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def started(pid: int) -> str:
    """Return a process's start time in ticks since boot as text; empty if unavailable.

    Process ids are reused, but an id together with a start time is unique.
    """
    return "".join(status(pid)[19:20])


def lock(path: Path) -> IO[str]:
    """Wait for and take the lock on a file; closing the result, or the end of the process, releases it."""
    # Forked processes close it, see _leave_locks(): a child in an uninterruptible disk wait would otherwise
    # keep the job's successor out.
    file = open(path, "a")  # noqa: SIM115 - the caller closes it
    _locks.add(file)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def try_lock(path: Path) -> IO[str] | None:
    """Take a lock like :func:`lock` without waiting; ``None`` if another process holds it."""
    file = open(path, "a")  # noqa: SIM115 - the caller closes it
    _locks.add(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        raise
    return file


def delete(folder: Path) -> None:
    """Delete a folder, tolerating that other processes delete it at the same time.

    Raises:
        OSError: something in it cannot be deleted.
    """
    while os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


class Sole:
    """Exclusive right to write something, held until the process ends; a lock file names the holder.

    On a file system without locks a file ``PATH.held`` is created exclusively. If its process has ended,
    processes on the same machine or in the same container detect this and remove the file. Other processes
    get an error that names the file to delete.

    Args:
        path: lock file, which exists while the right is held.
        what: name of the written object at the start of messages.

    Raises:
        RunError: another process holds the right, or may hold it.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._held = path.with_name(f"{path.name}.held")
        self._mine = ""  # content of `_held` on file systems without locks
        self._made_folder = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._take(what)

    def _take(self, what: str) -> IO[str] | None:
        while True:
            try:
                lock = try_lock(self._path)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self._mine = _make_sole(self._held, what)
                return None
            if lock is None:
                raise RunError(
                    f"{what} is being written by {self._holder()}; wait until it has ended, or name another "
                    "folder"
                )
            # The previous holder may have removed the file after we opened it: then try again.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(self._path)):
                    break
            lock.close()
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), _me().encode())
        return lock

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            text = self._path.read_text(encoding="utf-8", errors="replace")[:_SHOWN]
            if text and text.isprintable():
                return text
        return "another process"

    def end(self) -> None:
        """Release the right; further calls do nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._path.unlink(missing_ok=True)  # before the lock is released: a waiting process checks for it
            lock.close()
        mine, self._mine = self._mine, ""
        if mine and _text(self._held) == mine:  # may have been deleted by hand, and taken by another process
            self._path.unlink(missing_ok=True)
            self._held.unlink(missing_ok=True)
        if self._made_folder:
            with contextlib.suppress(OSError):  # not empty, or deleted already
                self._path.parent.rmdir()


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _text(path: Path) -> str | None:
    """Return a file's text; ``None`` if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8", errors="replace")
    return None


def _make_sole(path: Path, what: str) -> str:
    """Create the ``.held`` file with this process's identity and return its content; raise if it is held."""
    pid = os.getpid()
    facts = {"who": _me(), "pid": pid, "started": started(pid), "where": _where(), "id": uuid.uuid4().hex}
    mine = json.dumps(facts)
    while True:
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(mine)
        except FileExistsError:
            theirs = _text(path)
            if theirs is not None:  # else the holder has just removed it: try again
                _clear(path, theirs, what)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        else:
            return mine


def _clear(path: Path, theirs: str, what: str) -> None:
    """Remove the held file if its process has ended; raise if that process is or may be running."""
    try:
        facts = json.loads(theirs)
        pid, began, who = int(facts["pid"]), str(facts["started"]), str(facts["who"])[:_SHOWN]
        here = facts["where"] == _where()
    except (ValueError, KeyError, TypeError, RecursionError):
        _refuse(path, what, "another process")  # the file is being written, or its writer was killed
    # A running process with another start time has reused the id of the ended holder.
    now = started(pid)
    if not here or (is_running(pid) and not (now and began and now != began)):
        _refuse(path, what, who)
    # Only one successor may remove the file, and only while its content is unchanged: another successor may
    # have removed it and created its own.
    ended = path.with_name(f"{path.name}.ended")
    try:
        ended.open("x").close()
    except FileExistsError:
        _refuse(ended, what, "another process")
    try:
        if _text(path) == theirs:
            path.unlink()
    finally:
        ended.unlink()


def _refuse(path: Path, what: str, who: str) -> NoReturn:
    raise RunError(
        f"{what} is being written by {who}, as {path} says; wait until it has ended, or name another folder. "
        "This file system has no locks, and a process that was killed on another machine or in another "
        f"container leaves its file: if that one has ended, delete the file: {path}"
    )


def _where() -> str:
    """Return an identifier of the scope in which process ids are unique: machine and boot, or container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(parts)


def _leave_locks() -> None:
    for file in list(_locks):
        file.close()


os.register_at_fork(after_in_child=_leave_locks)


def end_with_parent(parent: int) -> bool:
    """Make the kernel kill this process when its parent ends, on Linux only.

    Args:
        parent: process id of the parent, whose main thread started this process.

    Returns:
        Whether the parent is still running.
    """
    # A writer that outlives its job would share files and pipes with the next job.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    return os.getppid() == parent  # it may have ended before prctl took effect
