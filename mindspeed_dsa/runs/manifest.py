"""The list of a checkpoint's files, with which a checkpoint is known to be whole: ``dsa_manifest.json``.

A save renames it into the checkpoint's folder last, so that a folder with one was written to its end.
For each file it has the number of bytes and, on request, the CRC-32 of zlib, which finds flipped bits; it is
no protection against somebody who means harm. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs.files import RunError, amount, sync, write_atomically

try:  # the same sums, of four times as many bytes a second
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

NAME = "dsa_manifest.json"
_FORMAT = "mindspeed_dsa.checkpoint/1"
_BLOCK = 128 << 10  # stays in a cache between the copy and the sum
_THREADS = 8


@dataclass(frozen=True)
class Entry:
    """One file.

    Attributes:
        size: bytes.
        crc32: checksum of its content, as zlib computes it; ``None`` where none was made.
    """

    size: int
    crc32: int | None = None


@dataclass(frozen=True)
class Manifest:
    """A list of a checkpoint's files.

    Attributes:
        name: of its folder, ``iter_0000100``.
        job: of the processes that wrote it; any text.
        files: by path below the folder, with ``/``.
    """

    name: str
    job: str
    files: Mapping[str, Entry]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    @property
    def has_sums(self) -> bool:
        """Return whether each file has a checksum."""
        return all(entry.crc32 is not None for entry in self.files.values())

    def __str__(self) -> str:
        return f"{len(self.files)} files, {amount(self.size)}"


def names(checkpoint: Path) -> list[str]:
    """Return what a manifest lists: every file below a folder but hidden ones of this library and itself.

    Raises:
        OSError: a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    found = []
    for parent, _, files in os.walk(checkpoint, onerror=fail):
        below = Path(parent).relative_to(checkpoint)
        found += [(below / name).as_posix() for name in files if not _is_ours(name)]
    return sorted(found)


def _is_ours(name: str) -> bool:
    return name == NAME or name.startswith(f".{NAME}")


def sums(checkpoint: Path, files: Iterable[str]) -> dict[str, Entry]:
    """Read files, in threads, and return their sizes and checksums.

    Raises:
        OSError: a file cannot be read.
    """
    files = list(files)
    with ThreadPoolExecutor(min(_THREADS, len(files), 2 * (os.cpu_count() or 1)) or 1) as threads:
        return dict(zip(files, threads.map(lambda name: _sum(checkpoint / name), files), strict=True))


def _sum(path: Path) -> Entry:
    size, crc, block = 0, 0, bytearray(_BLOCK)
    view = memoryview(block)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            crc = crc32(view[:count], crc)
            size += count
    return Entry(size, crc)


def sizes(checkpoint: Path) -> dict[str, Entry]:
    """Return every file of a checkpoint with its size.

    Raises:
        OSError: a file cannot be asked.
    """
    return {name: Entry((checkpoint / name).stat().st_size) for name in names(checkpoint)}


def complete(checkpoint: Path, job: str, summed: Mapping[str, Entry], name: str = "") -> Manifest:
    """Bring all files of a checkpoint to the disk, and write its manifest.

    Args:
        checkpoint: its folder.
        job: name of the processes that wrote it.
        summed: files whose checksums are known; of others the size is listed.
        name: name that the folder will have; by default the one it has.

    Raises:
        OSError: a file cannot be read, or nothing can be written.
    """
    files = sizes(checkpoint)
    for file in files:
        sync(checkpoint / file)
    return write(checkpoint, job, {**files, **summed}, name)


def write(checkpoint: Path, job: str, files: Mapping[str, Entry], name: str = "") -> Manifest:
    """Write the manifest of a checkpoint whose files are all on their way to the disk; nothing is written
    after it.

    Args:
        checkpoint: its folder.
        job: of the processes that wrote it.
        files: entries from :func:`sizes` or :func:`sums`; none mark a checkpoint that is being written.
        name: that the folder will have; by default the one it has.

    Raises:
        OSError: it cannot be written.
    """
    manifest = Manifest(name or checkpoint.name, job, files)
    content = {
        "format": _FORMAT,
        "checkpoint": manifest.name,
        "job": job,
        "files": {name: _facts(entry) for name, entry in sorted(files.items())},
    }
    write_atomically(checkpoint / NAME, json.dumps(content, indent=1) + "\n")
    return manifest


def _facts(entry: Entry) -> dict[str, Any]:
    checksum = {} if entry.crc32 is None else {"crc32": f"{entry.crc32:08x}"}
    return {"bytes": entry.size, **checksum}


def read(checkpoint: Path) -> Manifest | None:
    """Return a checkpoint's manifest; ``None`` where it has none, as those that Megatron alone has written.

    Raises:
        RunError: it cannot be read, or is another program's file; the message goes on from the checkpoint's
            name.
    """
    try:
        content = json.loads((checkpoint / NAME).read_bytes())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {str(content['format'])[:40]!r}")
        files = {name: _entry(name, facts) for name, facts in content["files"].items()}
        if not files:
            raise RunError("it was not written to its end")
        return Manifest(str(content["checkpoint"]), str(content["job"]), files)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{NAME} cannot be read ({error.strerror or error})") from error
    except KeyError as error:
        raise RunError(f"{NAME} is not a manifest (it has no {error})") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RunError(f"{NAME} is not a manifest ({str(error).splitlines()[0][:100]})") from error


def _entry(name: str, facts: Any) -> Entry:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it lists {name[:40]!r}, which is elsewhere")
    if b"\0" in os.fsencode(name):  # or characters that no file system has
        raise ValueError(f"it lists {name[:40]!r}, which names no file")
    return Entry(int(facts["bytes"]), int(facts["crc32"], 16) if "crc32" in facts else None)


def damage(checkpoint: Path, manifest: Manifest, contents: bool = False) -> str:
    """Return in words what a checkpoint lacks of its manifest; nothing if it is whole.

    Args:
        checkpoint: its folder.
        manifest: from :func:`read`.
        contents: read all files that have a checksum, besides the sizes of all.
    """
    if manifest.name != checkpoint.name:
        return f"{NAME} is that of {manifest.name[:40]}"
    for name, entry in manifest.files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
        if size != entry.size:
            return f"{name} has {size} bytes of {entry.size}"
    wanted = [name for name, entry in manifest.files.items() if contents and entry.crc32 is not None]
    try:
        found = sums(checkpoint, wanted)
    except OSError as error:
        where = Path(error.filename).name if error.filename else "a file"
        return f"{where} cannot be read ({error.strerror or error})"
    differ = [name for name in wanted if found[name] != manifest.files[name]]
    return f"{differ[0]} has another content than was written" if differ else ""
