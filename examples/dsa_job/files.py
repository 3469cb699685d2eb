"""Files that are either the old or the new version, whenever the process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path


def number(text: str) -> int | None:
    """The number that a file or a name holds; ``None`` unless it is made of a few of the digits 0 to 9."""
    # str.isdigit takes the digits of all scripts, of which int() refuses some; no file of ours has them.
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one step; it is on disk when this returns."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make everything below a folder survive a power cut."""
    for parent, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(parent))


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait for, and hold, a lock that ends with the process that holds it."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
