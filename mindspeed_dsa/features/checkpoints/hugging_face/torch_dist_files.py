"""Reader for Megatron's ``torch_dist`` checkpoints, one tensor region at a time, on PyTorch's own reader.

Megatron's reader needs all tensors of a rank in memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import itertools
import math
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mindspeed_dsa.features.checkpoints.hugging_face.pieces import Piece
from mindspeed_dsa.runs.files import RunError

INDEX = ".metadata"
_COMMON = "common_state/shard_0_1"


class Checkpoint(FileSystemReader):
    """Reader of a ``torch_dist`` checkpoint: tensor regions, and the job's arguments.

    Unpickling is restricted to torch's index classes, and tensors are loaded from their bytes only.

    Args:
        folder: folder of the checkpoint.

    Attributes:
        folder: folder of the checkpoint.
        tensors: dict from key to shape, dtype and chunks.

    Raises:
        RunError: the folder is not a ``torch_dist`` checkpoint, or it is incomplete.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        index = self.read_metadata()
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        ends: dict[str, int] = {}
        try:
            self.set_up_storage_reader(index, is_coordinator=True)
            self.tensors = {
                key: stored
                for key, stored in index.state_dict_metadata.items()
                if isinstance(stored, TensorStorageMetadata)
            }
            for place in self.storage_data.values():
                name = place.relative_path
                # An index must not name files outside of its folder.
                if Path(name).name != name or "\0" in name:
                    raise ValueError(f"{name!r} is no file of this folder")
                # Minimum size of each file, to detect files that are cut short.
                ends[name] = max(ends.get(name, 0), place.offset + place.length)
        except Exception as error:  # a damaged index may hold anything
            raise self._damaged(error) from error
        for name, end in ends.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size < end:
                state = "is cut short" if path.is_file() else "is not there"
                raise RunError(f"mindspeed_dsa weights: {path} {state}; use a checkpoint that is whole")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index, read with a restricted unpickler."""
        # PyTorch's own method unpickles without restrictions, so a file could run arbitrary code.
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
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> RunError:
        path = self.folder / INDEX
        return RunError(
            f"mindspeed_dsa weights: {path} cannot be read ({error}); use a checkpoint that is whole"
        )

    def arguments(self) -> argparse.Namespace | None:
        """Return the arguments of the job that wrote the checkpoint; ``None`` if they are not stored.

        Raises:
            RunError: the arguments are damaged.
        """
        source: Any = self.folder / "common.pt"
        if not source.is_file():  # since 0.19 the arguments are an object among the tensors
            place = self.storage_data.get(MetadataIndex(_COMMON))
            if place is None:
                return None
            with open(self.folder / place.relative_path, "rb") as file:
                file.seek(place.offset)
                source = io.BytesIO(file.read(place.length))
        try:
            common = torch.load(source, map_location="cpu", weights_only=False, pickle_module=_Arguments)
        except Exception as error:  # a damaged pickle may raise anything
            raise RunError(
                f"mindspeed_dsa weights: the arguments in {self.folder} cannot be read ({error}); use a "
                "checkpoint that is whole"
            ) from error
        if isinstance(common, list) and len(common) == 1:  # as saved with Megatron-core 0.19
            (common,) = common
        args = common.get("args") if isinstance(common, dict) else None
        return args if isinstance(args, argparse.Namespace) else None

    def read(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Return a region of a tensor, without stacked axes.

        Args:
            piece: region to read; its ``data`` is not used.
            dtype: dtype of the result.

        Raises:
            RunError: a part of the region is missing in the checkpoint, or damaged.
        """
        region = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
        whole = self.tensors[piece.key]
        chunks = self._by_stack(piece.key, piece.stacked).get(piece.offset[: piece.stacked], [])
        stored = TensorStorageMetadata(whole.properties, whole.size, chunks)
        items = create_read_items_for_chunk_list(piece.key, stored, [region])
        # Chunks of one tensor do not overlap, so the sizes add up to the region if it is complete.
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != math.prod(piece.shape):
            raise RunError(
                f"mindspeed_dsa weights: {self.folder} has {covered} of {math.prod(piece.shape)} elements of "
                f"{piece.place}; use a checkpoint that is whole"
            )
        # A region inside one chunk is taken without a copy.
        target = torch.empty(piece.shape, dtype=dtype) if len(items) > 1 else _Taken(piece.shape)
        try:
            self.read_data(LoadPlan(items), _Into(target)).wait()
        except (RuntimeError, EOFError, pickle.UnpicklingError, AssertionError) as error:
            files = {self.storage_data[item.storage_index].relative_path for item in items}
            raise RunError(
                f"mindspeed_dsa weights: {' or '.join(str(self.folder / file) for file in files)} is damaged "
                f"({error}); use a checkpoint that is whole"
            ) from error
        result = target.tensor.to(dtype) if isinstance(target, _Taken) else target
        return result.reshape(piece.shape[piece.stacked :])

    def _by_stack(self, key: str, stacked: int) -> dict[tuple[int, ...], list[ChunkStorageMetadata]]:
        """Return a dict from stack indices, such as (layer, expert), to the key's chunks that cover them."""
        # Every read would otherwise search the chunks of all layers and experts.
        if key not in self._chunks:
            chunks = defaultdict[tuple[int, ...], list[ChunkStorageMetadata]](list)
            for chunk in self.tensors[key].chunks:
                axes = zip(chunk.offsets[:stacked], chunk.sizes[:stacked], strict=True)
                for place in itertools.product(*(range(begin, begin + size) for begin, size in axes)):
                    chunks[place].append(chunk)
            self._chunks[key] = dict(chunks)
        return self._chunks[key]


class _Taken:
    """Load target that stores the loaded tensor itself. A copy takes as long as the rest of the read."""

    tensor: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = torch.Size(shape)

    def detach(self) -> _Taken:
        """Return the target itself."""
        return self

    def size(self) -> torch.Size:
        """Return the shape."""
        return self._shape

    def copy_(self, tensor: Tensor) -> None:
        """Keep the tensor."""
        self.tensor = tensor


class _Into(DefaultLoadPlanner):
    """Load planner that puts the only requested tensor into a given target."""

    def __init__(self, target: Tensor | _Taken) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        """Return the slice of the target that PyTorch fills for ``read_item``."""
        if isinstance(self._target, _Taken):
            return self._target
        ends = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._target[tuple(slice(begin, begin + length) for begin, length in ends)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing, because the target is filled already."""


_OF_TORCH = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner"))
_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
}
# Indexes of Megatron-core 0.12 to 0.15 hold subclasses of PyTorch's classes, which have one field more.
_OF_MEGATRON = {
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): SavePlan,
}


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler restricted to the plain data of an index: dataclasses, enums, dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that an index may contain.

        Raises:
            UnpicklingError: any other class.
        """
        if (module, name) in _OF_MEGATRON:
            return _OF_MEGATRON[module, name]
        # A dotted name would reach into other modules.
        if "." not in name and (module in (*_OF_TORCH, "torch") or (module, name) in _OTHERS):
            member = super().find_class(module, name)
            record = isinstance(member, type) and (
                dataclasses.is_dataclass(member) or issubclass(member, enum.Enum)
            )
            if (module, name) in _OTHERS or isinstance(member, torch.dtype):
                return member
            if module in _OF_TORCH and record and member.__module__ == module:
                return member
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")


class _Plain:
    """Placeholder for objects of classes that are not needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Arguments:
    """Replacement for ``pickle`` when reading a job's arguments: it imports plain classes only."""

    class Unpickler(pickle.Unpickler):
        """Unpickler restricted to namespaces, containers and dtypes."""

        def find_class(self, module: str, name: str) -> Any:
            """Return an allowed class, or the placeholder."""
            plain = {("argparse", "Namespace"), ("collections", "OrderedDict"), ("builtins", "set")}
            of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            return super().find_class(module, name) if (module, name) in plain or of_torch else _Plain
