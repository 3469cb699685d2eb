"""Megatron's ``torch_dist`` checkpoints, by PyTorch's own writer, reader and plans, a region at a time.

Megatron's writer and reader want all of a rank's tensors in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import itertools
import math
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mindspeed_dsa.features.checkpoints.hugging_face.pieces import Piece
from mindspeed_dsa.runs.files import RunError

INDEX = ".metadata"
_COMMON = "common_state/shard_0_1"
_PART_BYTES = 2**29
"""Bytes of a file; a larger region has a file of its own."""

# -- writing -----------------------------------------------------------------------------------


class _Lazily(DefaultSavePlanner):
    """Planner that makes each object and tensor when PyTorch writes it.

    Args:
        make: functions that return regions and objects, by their places in the checkpoint.
    """

    def __init__(self, make: Mapping[MetadataIndex, Callable[[], Any]]) -> None:
        super().__init__()
        self._make = make
        self._last = threading.local()

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return a tensor, or an object's bytes."""
        # The writer keeps its tensors until the file is whole; the former one of this thread is written now.
        if (former := getattr(self._last, "made", None)) is not None:
            former.resize_(0)
            self._last.made = None
        made = self._make[write_item.index]()
        if isinstance(made, Tensor):
            if made.untyped_storage().resizable():  # memory of a mapped file is none of ours
                self._last.made = made.untyped_storage()
            return made
        content = io.BytesIO()
        torch.save(made, content)
        return content


def write_item(piece: Piece) -> WriteItem:
    """Return the plan to write a region."""
    chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
    properties = TensorProperties(dtype=piece.data.dtype)
    data = TensorWriteData(chunk, properties, torch.Size(piece.size))
    return WriteItem(MetadataIndex(piece.key, piece.offset), WriteItemType.SHARD, tensor_data=data)


def write_object(name: str) -> WriteItem:
    """Return the plan to write an object."""
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


class Saving:
    """Files of a checkpoint, which several processes and threads write; each makes the same plans.

    Args:
        folder: of the checkpoint.
        items: plans of all regions and objects, each with a function that returns it.
    """

    def __init__(self, folder: Path, items: Sequence[tuple[WriteItem, Callable[[], Any]]]) -> None:
        # A thread is lost with its error in a writer of several threads: each has writers of one.
        self._writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
        self._writer.set_up_storage_writer(is_coordinator=True)
        self._planner = _Lazily({item.index: make for item, make in items})
        parts = [SavePlan(part) for part in _parts([item for item, _ in items])]
        plans, self._metadata = create_default_global_save_plan(parts)
        self.plans = self._writer.prepare_global_plan(plans)

    def write(self, plan: SavePlan) -> list[Any]:
        """Write the file of a plan and sync it; return the writer's results for :meth:`end`.

        Raises:
            OSError: the disk does not take it.
        """
        try:
            return self._writer.write_data(plan, self._planner).wait()
        except RuntimeError as error:  # of torch's writer, in whose context is the system's
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    def end(self, results: list[list[Any]]) -> None:
        """Write the index; one process does it with the results of all."""
        self._writer.finish(self._metadata, results)


def nbytes_of(plan: SavePlan) -> int:
    """Return the bytes of a plan's tensors."""
    return sum(map(_nbytes, plan.items))


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _parts(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield neighbours that share a file."""
    ends = itertools.accumulate(map(_nbytes, items))
    numbered = zip(ends, items, strict=True)
    for _, part in itertools.groupby(numbered, lambda each: each[0] // _PART_BYTES):
        yield [item for _, item in part]


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Let ``torch.save`` leave out checksums, which take thrice the rest's time and nobody compares."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


# -- reading -----------------------------------------------------------------------------------


class Checkpoint(FileSystemReader):
    """Reader of a ``torch_dist`` checkpoint: regions of tensors, and the job's arguments.

    Nothing but torch's own classes of an index is unpickled, and of tensors only their bytes.

    Args:
        folder: of the checkpoint.

    Attributes:
        folder: of the checkpoint.
        tensors: shape, dtype and chunks by key.

    Raises:
        RunError: it is no such checkpoint, or is not whole.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        index = self.read_metadata()
        self.set_up_storage_reader(index, is_coordinator=True)
        self.tensors = {
            key: stored
            for key, stored in index.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        ends: dict[str, int] = {}
        for place in self.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in ends.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size < end:
                state = "is cut short" if path.is_file() else "is not there"
                raise RunError(f"mindspeed_dsa weights: {path} {state}; use a checkpoint that is whole")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index; as PyTorch reads it, a pickle may run anything."""
        path = self.folder / INDEX
        try:
            with open(path, "rb") as file:
                index = _IndexUnpickler(file).load()
            if not isinstance(index, Metadata):
                raise pickle.UnpicklingError(f"it is a {type(index).__name__}")
            return index
        except FileNotFoundError as error:
            raise RunError(
                f"mindspeed_dsa weights: {self.folder} is no checkpoint of --ckpt-format torch_dist: it has "
                f"no {INDEX}; name the folder of one, such as checkpoints/iter_0001000, or save in that "
                "format"
            ) from error
        except Exception as error:  # a damaged pickle may raise anything
            raise RunError(
                f"mindspeed_dsa weights: {path} cannot be read ({error}); use a checkpoint that is whole"
            ) from error

    def common(self) -> Path | IO[bytes] | None:
        """Return the state that is not sharded, as ``torch.load`` takes it; None: there is none.

        Since 0.19 it is an object among the tensors, before that a file.
        """
        path, place = self.folder / "common.pt", self.storage_data.get(MetadataIndex(_COMMON))
        if path.is_file():
            return path
        if place is None:
            return None
        with open(self.folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            return io.BytesIO(file.read(place.length))

    def read(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Return a region of a tensor, without the axes of stacks.

        Args:
            piece: region to read; its data are not looked at.
            dtype: of the result.

        Raises:
            RunError: the checkpoint has no part of it, or is damaged.
        """
        region = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
        whole = self.tensors[piece.key]
        chunks = self._by_stack(piece.key, piece.stacked).get(piece.offset[: piece.stacked], [])
        stored = TensorStorageMetadata(whole.properties, whole.size, chunks)
        items = create_read_items_for_chunk_list(piece.key, stored, [region])
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != math.prod(piece.shape):
            raise RunError(
                f"mindspeed_dsa weights: {self.folder} has {covered} of {math.prod(piece.shape)} elements of "
                f"{piece.place}; use a checkpoint that is whole"
            )
        target = torch.empty(piece.shape, dtype=dtype) if len(items) > 1 else _Taken(piece.shape)
        try:
            self.read_data(LoadPlan(items), _Into(target)).wait()
        except (RuntimeError, EOFError, pickle.UnpicklingError, AssertionError) as error:
            files = {self.storage_data[item.storage_index].relative_path for item in items}
            raise RunError(
                f"mindspeed_dsa weights: {' or '.join(str(self.folder / file) for file in files)} is damaged "
                f"({error}); use a checkpoint that is whole"
            ) from error
        found = target.tensor.to(dtype) if isinstance(target, _Taken) else target
        return found.reshape(piece.shape[piece.stacked :])

    def _by_stack(self, key: str, stacked: int) -> dict[tuple[int, ...], list[ChunkStorageMetadata]]:
        """Return a key's chunks by layer and expert: a search among all of them would be as long for each."""
        if key not in self._chunks:
            found = defaultdict[tuple[int, ...], list[ChunkStorageMetadata]](list)
            for chunk in self.tensors[key].chunks:
                axes = zip(chunk.offsets[:stacked], chunk.sizes[:stacked], strict=True)
                for place in itertools.product(*(range(begin, begin + size) for begin, size in axes)):
                    found[place].append(chunk)
            self._chunks[key] = dict(found)
        return self._chunks[key]


class _Taken:
    """Target of a read that takes the tensor: copies are as dear as the rest."""

    tensor: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = torch.Size(shape)

    def detach(self) -> _Taken:
        """Return itself."""
        return self

    def size(self) -> torch.Size:
        """Return the shape."""
        return self._shape

    def copy_(self, tensor: Tensor) -> None:
        """Take a tensor."""
        self.tensor = tensor


class _Into(DefaultLoadPlanner):
    """Planner that fills one target."""

    def __init__(self, target: Tensor | _Taken) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        """Return the part of the target that an item fills."""
        if isinstance(self._target, _Taken):
            return self._target
        ends = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._target[tuple(slice(begin, begin + length) for begin, length in ends)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the part is filled."""


_OF_TORCH = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner"))
_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
}


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that knows the plain data of an index alone: records, enumerations, dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that an index may have.

        Raises:
            UnpicklingError: it is none.
        """
        # A name with a dot would lead out of its module.
        if "." not in name and (module in (*_OF_TORCH, "torch") or (module, name) in _OTHERS):
            found = super().find_class(module, name)
            record = isinstance(found, type) and (
                dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
            )
            if (module, name) in _OTHERS or isinstance(found, torch.dtype):
                return found
            if module in _OF_TORCH and record and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")
