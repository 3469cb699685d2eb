"""Files that hold either the old or the new content, whenever the process is killed."""

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


def started(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; nothing where that cannot be asked.

    Numbers of processes come again; a number with its beginning does not.
    """
    return "".join(status(pid)[19:20])


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
    except OSError:
        file.close()
        raise
    return file


def delete(folder: Path) -> None:
    """Delete a folder that others may be deleting as well: what is gone already is deleted.

    Raises:
        OSError: something in it cannot be deleted.
    """
    while os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


class Sole:
    """The only writer of something, by a lock that ends with its process; a file beside says who it is.

    On a file system without locks it is a file that one process alone can make, ``PATH.held``. What a process
    that has ended leaves of it is known by its successors in the same machine or container alone; others are
    told what to delete.

    Args:
        path: of the file, which is there while something is written.
        what: is written; begins the message.

    Raises:
        RunError: another process writes it, or may do so.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._held = path.with_name(f"{path.name}.held")
        self._mine = ""  # what the latter says, where there are no locks
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
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(self._path)):
                    break
            lock.close()  # of a file that whoever had it has just removed
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
        """Let others write; called again it does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._path.unlink(missing_ok=True)
            lock.close()
        mine, self._mine = self._mine, ""
        if mine and _text(self._held) == mine:  # unless somebody has deleted it, and another one writes
            self._path.unlink(missing_ok=True)
            self._held.unlink(missing_ok=True)
        if self._made_folder:
            with contextlib.suppress(OSError):  # something was written, or it is gone
                self._path.parent.rmdir()


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _text(path: Path) -> str | None:
    """Return a file's text; ``None`` where there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8", errors="replace")
    return None


def _make_sole(path: Path, what: str) -> str:
    """Make a file that says who this process is, unless another one has it; return what it says."""
    pid = os.getpid()
    facts = {"who": _me(), "pid": pid, "started": started(pid), "where": _where(), "id": uuid.uuid4().hex}
    mine = json.dumps(facts)
    while True:
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(mine)
        except FileExistsError:
            theirs = _text(path)
            if theirs is not None:
                _clear(path, theirs, what)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        else:
            return mine


def _clear(path: Path, theirs: str, what: str) -> None:
    """Remove the file of a process that has ended; refuse if that one runs, or may run elsewhere."""
    try:
        facts = json.loads(theirs)
        pid, began, who = int(facts["pid"]), str(facts["started"]), str(facts["who"])[:_SHOWN]
        here = facts["where"] == _where()
    except (ValueError, KeyError, TypeError, RecursionError):
        _refuse(path, what, "another process")  # which has just made it, or was killed then
    now = started(pid)
    if not here or (is_running(pid) and not (now and began and now != began)):
        _refuse(path, what, who)
    # Only one of its successors removes it, and sees before that another has not done so and made its own.
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
    """Return whose numbers this process's is one of: a machine's since it was started, or a container's."""
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
