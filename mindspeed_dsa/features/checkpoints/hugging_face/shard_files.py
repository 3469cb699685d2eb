"""Shards of a Hugging Face model folder, written tensor by tensor.

A file is laid out as the safetensors library does it, so the same tensors give the same bytes, and is written
under a name that no other writer has: it gets its own when it is whole and on disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mindspeed_dsa.features.checkpoints.hugging_face.config import INDEX, SINGLE
from mindspeed_dsa.features.checkpoints.hugging_face.files import DTYPES, bytes_of
from mindspeed_dsa.runs.files import RunError, beside, sync, write_atomically

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LAYOUT = {dtype: place for place, dtype in enumerate(DTYPES.values())}
_ALIGNMENT = 8  # of the first tensor, in bytes
_PIECE = 2**25  # bytes of a tensor that are copied to be written


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor, as a header gives them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A file and the tensors that it holds."""

    file: str
    tensors: tuple[TensorSpec, ...]

    @property
    def header(self) -> bytes:
        """The file's first bytes: the header's length and the header."""
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in self.laid_out:
            begin, end = end, end + tensor.nbytes
            content[tensor.name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The tensors' names and dtypes, in the model's order."""
        return {tensor.name: tensor.dtype for tensor in self.tensors}

    @property
    def laid_out(self) -> list[TensorSpec]:
        """The tensors in the file's order: wide elements first, which keeps all aligned, then by name."""
        return sorted(self.tensors, key=lambda tensor: (_LAYOUT[tensor.dtype], tensor.name.encode("utf-8")))

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def divide(tensors: Iterable[TensorSpec], shard_bytes: int) -> list[Shard]:
    """Deal tensors out to files as transformers does: in order, until one would pass ``shard_bytes``.

    A larger tensor has a file of its own.

    Args:
        tensors: in the model's order, each name once.
        shard_bytes: of tensors in a file, at most.

    Returns:
        ``model.safetensors`` alone, or ``model-00001-of-00003.safetensors`` and so on.
    """
    dealt: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    filled = 0
    for tensor in tensors:
        if tensor.nbytes > shard_bytes:
            dealt.append([tensor])
            continue
        if filled + tensor.nbytes > shard_bytes:
            dealt.append(current)
            current, filled = [], 0
        current.append(tensor)
        filled += tensor.nbytes
    if current:
        dealt.append(current)
    counts = Counter(tensor.name for group in dealt for tensor in group)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"tensors of one model have one name: {', '.join(twice)}")
    if len(dealt) == 1:
        return [Shard(SINGLE, tuple(dealt[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(dealt):05d}.safetensors", tuple(group))
        for number, group in enumerate(dealt, start=1)
    ]


class ShardFile:
    """A shard that is being written; its tensors may come in any order.

    Use it in a ``with`` statement. At the end the file is synced to disk and gets its name; an exception
    leaves nothing.

    Args:
        folder: exists.
        shard: what the file will hold.

    Raises:
        RunError: on entry, the file exists; on leaving, tensors are missing; the disk refuses to take more.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.path = folder / shard.file
        self._partial = beside(self.path)
        self._header = shard.header
        self._specs = {tensor.name: tensor for tensor in shard.tensors}
        self._offsets: dict[str, int] = {}
        self._missing = set(self._specs)
        offset = len(self._header)
        for tensor in shard.laid_out:
            self._offsets[tensor.name] = offset
            offset += tensor.nbytes
        self._descriptor = -1

    def __enter__(self) -> ShardFile:
        if self.path.exists():
            raise RunError(
                f"mindspeed_dsa: {self.path} exists and stays as it is; remove it or name another folder"
            )
        try:
            self._descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise self._refused(error) from error
        try:
            self._put(memoryview(self._header), 0)
        except BaseException:
            self._abandon()
            raise
        return self

    def _abandon(self) -> None:
        os.close(self._descriptor)
        self._partial.unlink(missing_ok=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        if self._missing:
            self._abandon()
            raise RunError(
                f"mindspeed_dsa: {self.path} is not whole: {len(self._missing)} tensors were not written, "
                f"the first is {min(self._missing)}; write the shard again"
            )
        try:
            os.fsync(self._descriptor)
        except OSError as refusal:
            self._abandon()
            raise self._refused(refusal) from refusal
        os.close(self._descriptor)
        os.rename(self._partial, self.path)
        sync(self.path.parent)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, of the dtype and shape that the shard says; of any strides and device."""
        spec, offset = self._specs[name], self._offsets[name]
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, and {spec.dtype} {list(spec.shape)} was "
                "announced"
            )
        for piece in _pieces(tensor.detach()):
            self._put(bytes_of(piece), offset)
            offset += piece.nbytes
        self._missing.discard(name)

    def _put(self, view: memoryview, offset: int) -> None:
        try:
            while view:
                count = os.pwrite(self._descriptor, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> RunError:
        return RunError(
            f"mindspeed_dsa: {self.path} cannot be written ({error.strerror}); make room on the disk or "
            "name another folder, then write the shard again"
        )


def _pieces(rows: Tensor) -> Iterator[Tensor]:
    """Yield contiguous parts on the CPU; all at once where that takes no copy."""
    if rows.numel() == 0:
        return
    if rows.is_contiguous() and rows.device.type == "cpu":
        yield rows
        return
    rows = rows.view(1) if rows.dim() == 0 else rows
    at_once = max(1, _PIECE * len(rows) // (rows.numel() * rows.element_size()))
    for piece in rows.split(at_once):
        yield piece.contiguous().cpu()


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write ``model.safetensors.index.json``, or nothing where one file holds all.

    Args:
        folder: exists.
        shards: all of the model.
    """
    if len(shards) == 1:
        return
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard.tensors)},
        "weight_map": {tensor.name: shard.file for shard in shards for tensor in shard.tensors},
    }
    write_atomically(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def require_disk_space(folder: Path, nbytes: int) -> None:
    """Refuse to begin what the disk cannot take.

    Args:
        folder: where the files will be; it need not exist.
        nbytes: of all that will be written.

    Raises:
        RunError: the file system has less room.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise RunError(
            f"mindspeed_dsa: {folder} needs {nbytes:,} bytes, and its file system has {free:,} free; make "
            "room or name another folder"
        )
