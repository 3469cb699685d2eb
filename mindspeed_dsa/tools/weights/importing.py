"""Converts a Hugging Face model's files to a Megatron checkpoint, for ``--load`` in any layout."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.checkpoints.agreement import is_first, together
from mindspeed_dsa.features.checkpoints.hugging_face.contradictions import (
    differing_copies,
    first_contradiction,
)
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
from mindspeed_dsa.features.checkpoints.hugging_face.mismatch import Mismatch, wrong_shapes
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import (
    Piece,
    in_threads,
    pieces_of,
    read_piece,
)
from mindspeed_dsa.runs.files import RunError, Sole, delete, sync, sync_tree, write_atomically
from mindspeed_dsa.runs.whole_checkpoints import RELEASE, TRACKER
from mindspeed_dsa.tools.weights.model import built

WHO = "mindspeed_dsa weights"
Progress = Callable[[int], Callable[[int], None]]
Item = tuple[Piece | str, Callable[[], Any]]
_PART_BYTES = 2**29
"""Target size of a file, in bytes; a larger region gets its own file."""


@dataclass(frozen=True)
class Import:
    """Input and output of one import: Hugging Face files, and the Megatron checkpoint to write.

    Attributes:
        files: reader of the Hugging Face files.
        target: folder of checkpoints.
        values: Megatron's arguments of the model.
        vocabulary: number of padded embedding rows.
        dtype: dtype of the weights in the checkpoint.
        saved: arguments stored in the checkpoint.
    """

    files: Reader
    target: Path
    values: Mapping[str, Any]
    vocabulary: int
    dtype: torch.dtype
    saved: argparse.Namespace

    @property
    def partial(self) -> Path:
        """Folder of the unfinished checkpoint."""
        return self.target / f".{RELEASE}.partial"

    @property
    def final(self) -> Path:
        """Folder of the finished checkpoint."""
        return self.target / RELEASE


def run(wanted: Import, progress: Progress) -> None:
    """Write the checkpoint; under torchrun, each process writes some of its files.

    Args:
        wanted: model to import.
        progress: function called with this process's total bytes; returns a callback for the bytes of each
            file.

    Raises:
        RunError: the files do not match the model or have NaN or infinities, the target exists, or another
            process writes it.
    """
    shape = Shape.of(argparse.Namespace(**wanted.values), wanted.files.architecture)
    together(lambda: _check(wanted, shape), WHO)
    with _alone(wanted), built(wanted.values, wanted.vocabulary, wanted.dtype) as model:
        megatron = Megatron()
        state = model.sharded_state_dict()
        pieces = (piece for _, each in pieces_of(state, megatron) for piece in each)
        together(lambda: _require_none(wanted, wrong_shapes(pieces, wanted.files, shape)), WHO)
        together(lambda: _begin(wanted) if is_first() else None, WHO)
        common = {"args": wanted.saved, "iteration": 0, "checkpoint_version": 3.0}
        strategy = _strategy(megatron, wanted, shape, progress)
        megatron("core.dist_checkpointing").save({**state, **common}, str(wanted.partial), strategy)
        together(lambda: wanted.files.require_finite(WHO), WHO)
        together(lambda: _publish(wanted) if is_first() else None, WHO)


def _check(wanted: Import, shape: Shape) -> None:
    _require_free_name(wanted)
    _require_none(wanted, filter(None, [first_contradiction(wanted.files)]))
    _require_none(wanted, Mismatch.of(shape, wanted.files).problems(dense=False))
    if is_first():  # the others would read the same large tensors
        _require_none(wanted, differing_copies(wanted.files, shape))
    wanted.files.check_factors()


def _require_none(wanted: Import, problems: Iterable[str]) -> None:
    if found := list(problems):
        raise RunError(
            f"{WHO}: {wanted.files.folder}: {'; '.join(found)}; fetch the files again, or name a folder "
            "whose files belong to its config.json"
        )


def _require_free_name(wanted: Import) -> None:
    """Raise an error if the target has a finished import, or checkpoints of a job."""
    tracker = wanted.target / TRACKER
    if wanted.final.exists():
        raise RunError(f"{WHO}: {wanted.final} exists already; remove it, or name another folder")
    newest = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else RELEASE
    if newest != RELEASE:
        raise RunError(
            f"{WHO}: {wanted.target} has checkpoints of a job, the newest {newest}, in whose place --load "
            "would take the imported one; name another folder"
        )


@contextlib.contextmanager
def _alone(wanted: Import) -> Iterator[None]:
    """Hold a lock file on the first rank, to keep other imports out."""
    lock, what = wanted.target / f".{RELEASE}.lock", f"{WHO}: {wanted.final}"
    sole = together(lambda: Sole(lock, what) if is_first() else None, WHO)
    try:
        yield
    finally:
        if sole is not None:
            sole.end()


def _begin(wanted: Import) -> None:
    _require_free_name(wanted)  # again: another import may have finished before this one got the lock
    delete(wanted.partial)  # left by a killed import
    wanted.partial.mkdir(parents=True)


def _publish(wanted: Import) -> None:
    sync_tree(wanted.partial)
    # Write the tracker first: after a crash between the two, no finished folder lacks its tracker.
    write_atomically(wanted.target / TRACKER, RELEASE)
    os.rename(wanted.partial, wanted.final)
    sync(wanted.target)


# -- files of the checkpoint ---------------------------------------------------------------------


def _strategy(megatron: Megatron, wanted: Import, shape: Shape, progress: Progress) -> Any:
    """Return a save strategy for Megatron that creates each tensor only when it is written."""
    torch_dist: Any = megatron("core.dist_checkpointing.strategies.torch")

    # Since 0.17 Megatron ignores strategies that are not derived from its own class.
    class Streaming(torch_dist.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
            items = together(lambda: list(_items(sharded_state_dict, megatron, wanted, shape)), WHO)
            save(Path(checkpoint_dir), items, progress)

    return Streaming("torch_dist", 1)


def _items(state: Any, megatron: Megatron, wanted: Import, shape: Shape) -> Iterator[Item]:
    """Yield the checkpoint's tensors and objects, in the same order on every rank."""
    mapping: Any = megatron("core.dist_checkpointing.mapping")
    for entry in _entries(state, mapping.ShardedObject, mapping.ShardedTensor):
        if isinstance(entry, mapping.ShardedObject):
            # In a list, because Megatron stores and reads a list of objects per name.
            yield entry.unique_key, partial(list, [entry.data])
            continue
        ((_, (piece,)),) = pieces_of({"": entry}, megatron)
        if any(name not in wanted.files.names for name in shape.names(piece.place)):
            raise RunError(
                f"{WHO}: this release of Megatron builds {piece.place}, which the files of such a model do "
                "not have; report it, with config.json"
            )
        yield piece, partial(_read, piece, wanted.files, shape)


def _entries(state: Any, *kinds: type) -> list[Any]:
    if isinstance(state, kinds):
        return [state]
    children = state.values() if isinstance(state, Mapping) else state if isinstance(state, Sequence) else ()
    return [entry for child in children if not isinstance(child, str) for entry in _entries(child, *kinds)]


def _read(piece: Piece, files: Reader, shape: Shape) -> Tensor:
    return read_piece(piece, files, shape).view(piece.shape)


def save(folder: Path, items: Sequence[Item], progress: Progress) -> None:
    """Write a checkpoint's files with PyTorch's writer. All processes must call it; each writes some files.

    Args:
        folder: checkpoint's folder.
        items: pairs of a region or an object's name and a function that returns the data; equal on all ranks.
        progress: function as for :func:`run`.

    Raises:
        RunError: writing failed on any rank; raised on all ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # A multi-threaded FileSystemWriter loses errors of its threads, so each thread has its own writer.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    planned = [(_write_item(what), make) for what, make in items]
    planner = _Lazily({item.index: make for item, make in planned})
    parts = [SavePlan(part) for part in _parts([item for item, _ in planned])]
    plans, index = create_default_global_save_plan(parts)
    mine = writer.prepare_global_plan(plans)[rank::ranks]

    def write(plan: SavePlan) -> list[Any]:
        try:
            return writer.write_data(plan, planner).wait()
        except RuntimeError as error:  # torch's writer wraps the OSError, which is its context
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    def write_all() -> list[Any]:
        nbytes = [sum(map(_nbytes, plan.items)) for plan in mine]
        wrote, results = progress(sum(nbytes)), []
        with _without_checksums():
            for done, result in zip(nbytes, in_threads(write, mine), strict=True):
                results += result
                wrote(done)
        return results

    everything: list[Any] = [None] * ranks
    dist.all_gather_object(everything, together(write_all, WHO))
    together(lambda: writer.finish(index, everything) if rank == 0 else None, WHO)


class _Lazily(DefaultSavePlanner):
    """Planner that creates each object and tensor only when PyTorch writes it.

    Args:
        make: dict from index in the checkpoint to the function that returns the tensor or object.
    """

    def __init__(self, make: Mapping[MetadataIndex, Callable[[], Any]]) -> None:
        super().__init__()
        self._make = make
        self._last = threading.local()

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return a tensor, or an object serialized to bytes."""
        # The writer keeps references until the file is complete. This thread's previous tensor is written, so
        # free its memory here.
        if (former := getattr(self._last, "made", None)) is not None:
            former.resize_(0)
            self._last.made = None
        made = self._make[write_item.index]()
        if isinstance(made, Tensor):
            if made.untyped_storage().resizable():  # not a view of a memory-mapped file
                self._last.made = made.untyped_storage()
            return made
        content = io.BytesIO()
        torch.save(made, content)
        return content


def _write_item(what: Piece | str) -> WriteItem:
    if isinstance(what, str):
        return WriteItem(MetadataIndex(what), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(what.offset), torch.Size(what.shape))
    data = TensorWriteData(chunk, TensorProperties(dtype=what.data.dtype), torch.Size(what.size))
    return WriteItem(MetadataIndex(what.key, what.offset), WriteItemType.SHARD, tensor_data=data)


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _parts(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield lists of consecutive items, one list for each file to write."""
    ends = itertools.accumulate(map(_nbytes, items))
    numbered = zip(ends, items, strict=True)
    # Items whose end is in the same multiple of 512 MiB share a file.
    for _, part in itertools.groupby(numbered, lambda each: each[0] // _PART_BYTES):
        yield [item for _, item in part]


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Switch off CRC32 checksums of ``torch.save``, which take three times as long as the rest of a save."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
