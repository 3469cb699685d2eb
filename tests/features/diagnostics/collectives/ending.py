"""A process of one rank that records collectives and ends in one of several ways.

``python -m tests.features.diagnostics.collectives.ending FOLDER WAY`` prints ``ready`` when it waits.
"""

from __future__ import annotations

import _thread
import gc
import os
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

import mindspeed_dsa

ENDS = ("forked", "bottom frame", "groups", "made anew")
"""Ways in which the process ends by itself and successfully."""


def start() -> None:
    """Initialize a process group and run the first collective."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))


def wait() -> None:
    """Wait outside of Python, as in a collective that never finishes."""
    store = dist.TCPStore("localhost", 0, is_master=True)
    print("ready", flush=True)
    store.wait(["never"])


def descriptors() -> int:
    """Return the number of open file descriptors."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def handle() -> None:
    """Install a SIGTERM handler that exits with status 7."""

    def leave(number: int, frame: FrameType | None) -> None:
        os._exit(7)

    signal.signal(signal.SIGTERM, leave)


def wait_for_lock() -> None:
    """Wait for a lock that is never released."""
    # The second `acquire` never returns.
    lock = threading.Lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()


def fork() -> None:
    """Fork a child that exits silently with status 0."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(2.5)  # long enough for the other ranks to notice a lost rank
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


def fork_rank(store: Path) -> None:
    """Run as one of two ranks; the other one is forked, and exits silently with status 0."""
    child = os.fork()
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=int(child == 0), world_size=2)
    dist.all_reduce(torch.ones(3))
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(13)  # earlier releases ended the job by then, as if a rank had been killed


def call_at_the_bottom() -> None:
    """Call a collective as the bottom frame of a thread."""
    failed: list[object] = []
    # A failure in such a thread cannot be raised anywhere else.
    sys.unraisablehook = failed.append
    for _ in range(20):
        _thread.start_new_thread(dist.barrier, ())
    time.sleep(1)
    assert not failed, failed


def make_groups(*, world: bool) -> None:
    """Make and destroy process groups, and check that no descriptor and no group remains."""
    before = descriptors()
    for _ in range(5):
        if world:
            dist.destroy_process_group()
            start()
        else:
            group = dist.new_group([0])
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
            del group
    time.sleep(0.5)  # lets the watcher threads end
    assert descriptors() <= before, (before, descriptors(), os.popen(f"ls -l /proc/{os.getpid()}/fd").read())
    assert sum(isinstance(each, dist.ProcessGroup) for each in gc.get_objects()) <= 1


def main(folder: Path, way: str) -> None:
    """Run one way of ending.

    Args:
        folder: directory of the records.
        way: name of the way.
    """
    mine, other = socket.socketpair()
    for endpoint in (mine, other):
        # A wakeup descriptor has to be non-blocking.
        endpoint.setblocking(False)
    if way == "handled before":
        handle()
    mindspeed_dsa.enable(record_collectives=str(folder), record_collectives_after=60.0)
    if way == "forked rank":
        fork_rank(folder.with_name("store"))
        return
    start()
    if way == "another wakeup":
        signal.set_wakeup_fd(mine.fileno())
    elif way in ("gone", "unwritable"):
        shutil.rmtree(folder)
        if way == "unwritable":
            folder.write_text("a file")
        dist.all_reduce(torch.ones(3), group=dist.new_group([0]))
    elif way == "full":
        # No file may grow, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        dist.all_reduce(torch.ones(3), group=dist.new_group([0]))
    elif way.startswith("handled"):
        if way == "handled":
            handle()
        wait_for_lock()
    elif way == "failed":
        raise ValueError("a bad batch")
    elif way == "forked":
        fork()
    elif way == "bottom frame":
        call_at_the_bottom()
    elif way in ("groups", "made anew"):
        make_groups(world=way == "made anew")
    if way not in ENDS:
        wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
