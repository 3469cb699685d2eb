"""A disk that can fill up and a link that can be slow, for this process and its children.

Both need Linux and root: they are namespaces of this process, which end with their last process. Without
them, a full disk is a limit on the size of files, and there is no slow link.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.linkbed import LinkBedError, require_tools

_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000  # CLONE_NEWNS and CLONE_NEWNET of <linux/sched.h>
_PRINTED = 64 << 10  # a job prints less than that, and a shard is larger
_RATE = ("rate", "4mbit", "burst", "256k", "latency", "400ms")


class Surroundings:
    """Disk and link of the jobs.

    Args:
        disk: folder on the disk, empty or not yet made.
        size: size of the disk in bytes.

    Attributes:
        skipped: unavailable disturbances, with reasons.
    """

    def __init__(self, disk: Path, size: int = 1 << 30) -> None:
        self.disk, self._size, self.skipped = disk, size, dict[str, str]()
        disk.mkdir(parents=True, exist_ok=True)
        self._mounted = self._try("full disk: a limit on the size of files takes its place", self._mount)
        self._linked = self._try("slow link", self._isolate_network)

    def _try(self, what: str, make: Callable[[], None]) -> bool:
        try:
            make()
        except (OSError, AttributeError, subprocess.CalledProcessError, LinkBedError) as error:
            self.skipped[what] = str(error)
            return False
        return True

    def _mount(self) -> None:
        _unshare(_NEW_MOUNTS)
        # Mounts made below must stay in this namespace.
        _run("mount", "--make-rprivate", "/")
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size}", "soak", str(self.disk))

    def _isolate_network(self) -> None:
        require_tools()
        _unshare(_NEW_NETWORK)
        _run("ip", "link", "set", "lo", "up")
        # Check that the kernel can limit the rate; slow_link() sets the limit.
        _run("tc", "qdisc", "add", "dev", "lo", "root", "tbf", *_RATE)
        _run("tc", "qdisc", "del", "dev", "lo", "root")

    @property
    def has_link(self) -> bool:
        """Whether there is a link that can be slowed."""
        return self._linked

    @contextlib.contextmanager
    def full_disk(self, processes: Sequence[psutil.Process], room: int) -> Iterator[None]:
        """Leave ``room`` bytes on the disk; without a disk, limit these processes and their children."""
        if not self._mounted:
            limit = max(room, _PRINTED)
            for process in processes:
                with contextlib.suppress(psutil.Error, OSError):
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
            yield
            return
        while not self._leave(room):
            pass  # the job has written meanwhile
        try:
            yield
        finally:
            self._resize(self._size)

    def _leave(self, room: int) -> bool:
        disk = os.statvfs(self.disk)
        try:
            # The used bytes and the room; mounting fails if more is used by then.
            self._resize((disk.f_blocks - disk.f_bfree) * disk.f_frsize + room)
        except subprocess.CalledProcessError:
            return False
        return True

    def _resize(self, size: int) -> None:
        _run("mount", "-o", f"remount,size={size}", str(self.disk))

    @contextlib.contextmanager
    def slow_link(self) -> Iterator[None]:
        """Limit the traffic of all ranks together to 4 Mbit/s."""
        _run("tc", "qdisc", "add", "dev", "lo", "root", "tbf", *_RATE)
        try:
            yield
        finally:
            _run("tc", "qdisc", "del", "dev", "lo", "root")


def _unshare(what: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(what):
        number = ctypes.get_errno()
        raise OSError(number, f"no namespace of its own: {os.strerror(number)}; run as root")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
