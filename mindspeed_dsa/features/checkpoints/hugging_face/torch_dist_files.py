"""Files of Megatron's ``torch_dist`` checkpoints, written and read a tensor at a time.

The format is that of ``torch.distributed.checkpoint``: ``.distcp`` files in which tensors saved by
``torch.save`` follow each other, and a pickled index ``.metadata``. Megatron and torch write from tensors in
memory; here one tensor at a time exists, and what has been written survives a kill: files are finished one by
one, each with a record of its contents, and the index is made of the records in the end.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mindspeed_dsa.runs.files import RunError, sync, write_atomically, written

INDEX = ".metadata"
_COMMON = "common_state/shard_0_1"
_RECORDS = ".records"
"""Folder, within an unfinished checkpoint, of what its finished files contain."""


# -- writing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """Something to be written.

    Attributes:
        name: of the tensor, of which this may be a region, or of an object.
        make: makes the tensor, of ``shape``, or the object; called once, when it is written.
        shape: of the region; None for an object.
        offset, size: of the region in the tensor, and the tensor's shape.
        dtype: of the tensor.
        bytes: that ``make`` gives, to share the work.
    """

    name: str
    make: Callable[[], Any]
    shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    bytes: int = 0


def share(items: Sequence[Item], rank: int, ranks: int, part_bytes: int) -> dict[str, list[Item]]:
    """Return the files that a rank writes: neighbours together, in files of about so many bytes.

    Names and contents do not depend on how many share the work, so any number may go on with it.

    Args:
        items: of the checkpoint, the same on every rank.
        rank: this one.
        ranks: that share the work.
        part_bytes: of a file; an item that is larger has one of its own.
    """
    parts: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        if parts[-1] and filled + item.bytes > part_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(item)
        filled += item.bytes
    return {f"__0_{number}.distcp": parts[number] for number in range(rank, len(parts), ranks)}


def write_part(folder: Path, name: str, items: Iterable[Item], wrote: Callable[[int], None]) -> None:
    """Write a file and the record of its contents; one that has a record is left as it is.

    Args:
        folder: of the unfinished checkpoint.
        name: of the file.
        items: of it.
        wrote: called with the bytes of each item, also of one that was there.
    """
    record = folder / _RECORDS / f"{name}.json"
    if record.exists():
        for item in items:
            wrote(item.bytes)
        return
    record.parent.mkdir(exist_ok=True)
    contents = []
    with written(folder / name) as file:
        for item in items:
            begin = file.tell()
            _save(item.make(), file, folder / name)
            contents.append({**_described(item), "begin": begin, "length": file.tell() - begin})
            wrote(item.bytes)
    write_atomically(record, json.dumps(contents))


def _save(content: Any, file: IO[bytes], path: Path) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:  # of torch's writer, in whose context is what the system has said
        raise RunError(
            f"mindspeed_dsa weights: {path} cannot be written ({error.__context__ or error}); make room, or "
            "name a folder that can be written, and give the command again"
        ) from error


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Let ``torch.save`` leave out checksums, which take thrice the rest's time and nobody compares.

    Torch before 2.6 cannot. The setting is the process's: threads enter it together.
    """
    options = getattr(torch.serialization, "set_crc32_options", None)
    if options is None:
        yield
        return
    before = torch.serialization.get_crc32_options()
    options(False)
    try:
        yield
    finally:
        options(before)


def _described(item: Item) -> dict[str, Any]:
    if item.shape is None:
        return {"name": item.name}
    dtype = str(item.dtype).removeprefix("torch.")
    return {
        "name": item.name, "shape": item.shape, "offset": item.offset, "size": item.size, "dtype": dtype
    }  # fmt: skip


def write_index(folder: Path) -> None:
    """Make a checkpoint's index of the records of all its files, and remove these; one rank calls it."""
    tensors: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    records = sorted((folder / _RECORDS).glob("*.json"))
    for record in records:
        for each in json.loads(record.read_text(encoding="utf-8")):
            name, place = each["name"], _StorageInfo(record.stem, each["begin"], each["length"])
            if "shape" not in each:
                tensors[name] = torch_metadata.BytesStorageMetadata()
                stored[torch_metadata.MetadataIndex(name)] = place
                continue
            properties = torch_metadata.TensorProperties(dtype=getattr(torch, each["dtype"]))
            known = tensors.setdefault(
                name, torch_metadata.TensorStorageMetadata(properties, torch.Size(each["size"]), [])
            )
            index = torch_metadata.MetadataIndex(name, each["offset"], len(known.chunks))
            known.chunks.append(
                torch_metadata.ChunkStorageMetadata(torch.Size(each["offset"]), torch.Size(each["shape"]))
            )
            stored[index] = place
    with written(folder / INDEX) as file:
        pickle.dump(torch_metadata.Metadata(tensors, storage_data=stored), file)
    for record in records:
        record.unlink()
    (folder / _RECORDS).rmdir()
    sync(folder)


# -- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """A region of a tensor that lies in one piece in a file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class Reader:
    """Tensors of a ``torch_dist`` checkpoint.

    Nothing but torch's own classes of an index is unpickled, and of tensors only their bytes.

    Args:
        folder: of the checkpoint.

    Raises:
        RunError: it is no such checkpoint, or is not whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors, self._objects = _contents(folder)
        self._last = threading.local()
        lengths: dict[str, int] = {}
        chunks = [chunk for stored in self.tensors.values() for chunk in stored.chunks]
        for chunk in (*chunks, *self._objects.values()):
            lengths[chunk.file] = max(lengths.get(chunk.file, 0), chunk.begin + chunk.length)
        for name, length in lengths.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size < length:
                state = "is cut short" if path.is_file() else "is not there"
                raise RunError(f"mindspeed_dsa weights: {path} {state}; use a checkpoint that is whole")

    def common(self) -> Path | IO[bytes] | None:
        """Return what holds the state that is not sharded, as ``torch.load`` takes it; None: there is none.

        Since 0.19 it is an object among the tensors, before that a file.
        """
        path, place = self.folder / "common.pt", self._objects.get(_COMMON)
        if path.is_file():
            return path
        if place is None:
            return None
        with open(self.folder / place.file, "rb") as file:
            file.seek(place.begin)
            return io.BytesIO(file.read(place.length))

    def read(self, name: str, begin: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a region of a tensor, which shares memory with what was read last where it can.

        Args:
            name: of the tensor.
            begin: where the region begins.
            shape: of the region.
            dtype: of the result.

        Raises:
            RunError: the checkpoint has no part of it.
        """
        stored, covered = self.tensors[name], 0
        target: Tensor | None = None
        for chunk in stored.chunks:
            first = [max(b, c) for b, c in zip(begin, chunk.offset, strict=True)]
            last = [
                min(b + s, c + n) for b, s, c, n in zip(begin, shape, chunk.offset, chunk.shape, strict=True)
            ]
            if any(b >= e for b, e in zip(first, last, strict=True)):
                continue
            ours = tuple(slice(b - o, e - o) for b, e, o in zip(first, last, begin, strict=True))
            theirs = tuple(slice(b - o, e - o) for b, e, o in zip(first, last, chunk.offset, strict=True))
            part = self._load(chunk)[theirs]
            if part.shape == torch.Size(shape):  # copies are as dear as the rest
                return part.to(dtype)
            target = torch.empty(*shape, dtype=dtype) if target is None else target
            target[ours].copy_(part)
            covered += part.numel()
        if target is None or covered != target.numel():
            raise RunError(
                f"mindspeed_dsa weights: {self.folder} has {covered} of {math.prod(shape)} elements of "
                f"{name}; use a checkpoint that is whole"
            )
        return target

    def _load(self, chunk: Chunk) -> Tensor:
        """Return what a chunk holds; a thread's last one is kept, of which the next tensor may be a part."""
        known: tuple[Chunk, Tensor] | None = getattr(self._last, "read", None)
        if known is not None and known[0] == chunk:
            return known[1]
        self._last.read = known = None  # at most one in memory
        with open(self.folder / chunk.file, "rb") as file:
            try:
                part: Any = _Slice(file, chunk.begin, chunk.length)
                tensor: Tensor = torch.load(part, weights_only=True)
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise RunError(
                    f"mindspeed_dsa weights: {self.folder / chunk.file} is damaged at byte {chunk.begin} "
                    f"({error}); use a checkpoint that is whole"
                ) from error
        if tuple(tensor.shape) != chunk.shape:
            tensor = tensor.view(chunk.shape)
        self._last.read = chunk, tensor
        return tensor


class _Slice(io.RawIOBase):
    """Part of a file that reads like a file."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it can be positioned."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position; see ``io.IOBase.seek``."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read as much as fits, or is left."""
        view = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    # Megatron keeps in the index what each rank has planned to write, to plan the next checkpoint by it.
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict",
    "builtins": "set frozenset",
    "pathlib": "Path PosixPath PurePath PurePosixPath",
}
"""Names that an index may have, by module; a name with a dot would lead out of its module."""
_DTYPES = frozenset(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler of an index, which knows torch's classes for it alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that an index may have.

        Raises:
            UnpicklingError: it is none.
        """
        if name in _CLASSES.get(module, "").split() or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")


def _contents(folder: Path) -> tuple[dict[str, Stored], dict[str, Chunk]]:
    """Return a checkpoint's tensors, and its objects, by name."""
    try:
        with open(folder / INDEX, "rb") as file:
            index = _IndexUnpickler(file).load()
            return dict(_stored(index)), dict(_objects(index))
    except FileNotFoundError as error:
        raise RunError(
            f"mindspeed_dsa weights: {folder} is no checkpoint of --ckpt-format torch_dist: it has no "
            f"{INDEX}; name the folder of one, such as checkpoints/iter_0001000, or save in that format"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise RunError(
            f"mindspeed_dsa weights: {folder / INDEX} cannot be read ({error}); use a checkpoint that is "
            "whole"
        ) from error


def _stored(index: Any) -> Iterator[tuple[str, Stored]]:
    places: Mapping[Any, Any] = index.storage_data
    for name, known in index.state_dict_metadata.items():
        if not isinstance(known, torch_metadata.TensorStorageMetadata):
            continue
        chunks = []
        for each in known.chunks:
            place = places[torch_metadata.MetadataIndex(name, each.offsets)]
            chunks.append(
                Chunk(tuple(each.offsets), tuple(each.sizes), place.relative_path, place.offset, place.length)
            )
        yield name, Stored(tuple(known.size), known.properties.dtype, tuple(chunks))


def _objects(index: Any) -> Iterator[tuple[str, Chunk]]:
    for name, known in index.state_dict_metadata.items():
        if isinstance(known, torch_metadata.BytesStorageMetadata):
            place = index.storage_data[torch_metadata.MetadataIndex(name)]
            yield name, Chunk((), (), place.relative_path, place.offset, place.length)
