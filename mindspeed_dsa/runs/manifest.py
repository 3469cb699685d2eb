"""Manifest of a checkpoint, ``dsa_manifest.json``: a list of its files, which proves that it is complete.

A manifest with files is the last file of a save, renamed into the checkpoint's folder. So its checkpoint was
written completely. An empty one marks a checkpoint whose save has not ended. Each file is listed with its
size and, on request, zlib's CRC-32. The checksum detects bit flips, but does not protect against deliberate
changes. Imports neither torch nor Megatron.
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

try:  # same checksums at four times the speed
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

NAME = "dsa_manifest.json"
_FORMAT = "mindspeed_dsa.checkpoint/1"
_BLOCK = 128 << 10  # bytes; a block stays in the cache from the read to the checksum
_THREADS = 8


@dataclass(frozen=True)
class Entry:
    """Size and checksum of a file.

    Attributes:
        size: size in bytes.
        crc32: zlib's CRC-32 of the content; ``None`` if not computed.
    """

    size: int
    crc32: int | None = None


@dataclass(frozen=True)
class Manifest:
    """List of a checkpoint's files.

    Attributes:
        name: name of the checkpoint's folder, ``iter_0000100``.
        job: name of the job that wrote it, any text.
        files: dict from path below the folder, with ``/``, to the file's entry.
    """

    name: str
    job: str
    files: Mapping[str, Entry]

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(entry.size for entry in self.files.values())

    @property
    def has_sums(self) -> bool:
        """Return whether every file has a checksum."""
        return all(entry.crc32 is not None for entry in self.files.values())

    def __str__(self) -> str:
        return f"{len(self.files)} files, {amount(self.size)}"


def names(checkpoint: Path) -> list[str]:
    """Return the files below a folder that a manifest lists: all except the manifest and its temporary files.

    Raises:
        OSError: a folder cannot be read.
    """

    # os.walk ignores errors unless they are raised.
    def fail(error: OSError) -> None:
        raise error

    listed = []
    for parent, _, files in os.walk(checkpoint, onerror=fail):
        below = Path(parent).relative_to(checkpoint)
        listed += [(below / name).as_posix() for name in files if not _is_ours(name)]
    return sorted(listed)


def _is_ours(name: str) -> bool:
    return name == NAME or name.startswith(f".{NAME}")


def sums(checkpoint: Path, files: Iterable[str]) -> dict[str, Entry]:
    """Compute the sizes and checksums of files, with several threads.

    Raises:
        OSError: a file cannot be read.
    """
    files = list(files)
    with ThreadPoolExecutor(min(_THREADS, len(files), 2 * (os.cpu_count() or 1)) or 1) as threads:
        return dict(zip(files, threads.map(lambda name: _sum(checkpoint / name), files), strict=True))


def _sum(path: Path) -> Entry:
    size, crc, block = 0, 0, bytearray(_BLOCK)
    view = memoryview(block)  # slices of it are not copied
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            crc = crc32(view[:count], crc)
            size += count
    return Entry(size, crc)


def sizes(checkpoint: Path) -> dict[str, Entry]:
    """Return all files of a checkpoint with their sizes.

    Raises:
        OSError: a file or folder cannot be read.
    """
    return {name: Entry((checkpoint / name).stat().st_size) for name in names(checkpoint)}


def complete(checkpoint: Path, job: str, summed: Mapping[str, Entry], name: str = "") -> Manifest:
    """Sync all files of a checkpoint to disk, then write its manifest.

    Args:
        checkpoint: folder of the checkpoint.
        job: name of the job that wrote it.
        summed: entries with checksums; other files are listed with their size.
        name: final name of the folder; default: its current name.

    Raises:
        OSError: a file cannot be read, or the folder is not writable.
    """
    files = sizes(checkpoint)
    for file in files:
        sync(checkpoint / file)
    return write(checkpoint, job, {**files, **summed}, name)


def write(checkpoint: Path, job: str, files: Mapping[str, Entry], name: str = "") -> Manifest:
    """Write the manifest of a checkpoint whose files are already synced. No file may be written afterwards.

    Args:
        checkpoint: folder of the checkpoint.
        job: name of the job that wrote it.
        files: entries from :func:`sizes` or :func:`sums`; an empty dict marks an unfinished checkpoint.
        name: final name of the folder; default: its current name.

    Raises:
        OSError: the manifest cannot be written.
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
    """Return a checkpoint's manifest; ``None`` if it has none, like checkpoints of stock Megatron.

    Raises:
        RunError: the file cannot be read or is not a manifest. Callers prefix the message with the
            checkpoint's name.
    """
    try:
        content = json.loads((checkpoint / NAME).read_bytes())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {str(content['format'])[:40]!r}")
        files = {name: _entry(name, facts) for name, facts in content["files"].items()}
        if not files:  # an empty list marks an unfinished checkpoint
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
    # A damaged or foreign manifest must not name files outside of the checkpoint.
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it lists {name[:40]!r}, which is elsewhere")
    if b"\0" in os.fsencode(name):  # raises for characters that no file system accepts
        raise ValueError(f"it lists {name[:40]!r}, which names no file")
    return Entry(int(facts["bytes"]), int(facts["crc32"], 16) if "crc32" in facts else None)


def damage(checkpoint: Path, manifest: Manifest, contents: bool = False) -> str:
    """Describe the first deviation of a checkpoint from its manifest; empty if it is complete.

    Args:
        checkpoint: folder of the checkpoint.
        manifest: manifest from :func:`read`.
        contents: whether to compare checksums in addition to sizes.
    """
    if manifest.name != checkpoint.name:
        return f"{NAME} is that of {manifest.name[:40]}"
    # Sizes first: checking them reads no content.
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
        actual = sums(checkpoint, wanted)
    except OSError as error:
        where = Path(error.filename).name if error.filename else "a file"
        return f"{where} cannot be read ({error.strerror or error})"
    differ = [name for name in wanted if actual[name] != manifest.files[name]]
    return f"{differ[0]} has another content than was written" if differ else ""
