"""Hugging Face's files written as a checkpoint of Megatron's that ``--load`` takes under any layout."""

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
"""Bytes of a file; a larger region has a file of its own."""


@dataclass(frozen=True)
class Import:
    """A model to be imported.

    Attributes:
        files: Hugging Face's.
        target: folder of checkpoints.
        values: Megatron's arguments of the model.
        vocabulary: padded rows of the embedding.
        dtype: dtype of the weights in the checkpoint.
        saved: arguments that the checkpoint remembers.
    """

    files: Reader
    target: Path
    values: Mapping[str, Any]
    vocabulary: int
    dtype: torch.dtype
    saved: argparse.Namespace

    @property
    def partial(self) -> Path:
        """Folder of what is not finished."""
        return self.target / f".{RELEASE}.partial"

    @property
    def final(self) -> Path:
        """Folder of the checkpoint."""
        return self.target / RELEASE


def run(wanted: Import, progress: Progress) -> None:
    """Write the checkpoint; with several processes, which have a group, each writes a share of its files.

    Args:
        wanted: model to import.
        progress: function of all bytes that this process writes; its result is called with each file's.

    Raises:
        RunError: the files do not fit, something has that name already, or another process writes it.
    """
    shape = Shape.of(argparse.Namespace(**wanted.values))
    together(lambda: _check(wanted, shape), WHO)
    with _alone(wanted), built(wanted.values, wanted.vocabulary, wanted.dtype) as model:
        megatron = Megatron()
        state = model.sharded_state_dict()
        pieces = (piece for _, each in pieces_of(state, megatron) for piece in each)
        together(lambda: _require_none(wanted, wrong_shapes(pieces, wanted.files, shape.layers)), WHO)
        together(lambda: _begin(wanted) if is_first() else None, WHO)
        common = {"args": wanted.saved, "iteration": 0, "checkpoint_version": 3.0}
        strategy = _strategy(megatron, wanted, shape.layers, progress)
        megatron("core.dist_checkpointing").save({**state, **common}, str(wanted.partial), strategy)
        together(lambda: _publish(wanted) if is_first() else None, WHO)


def _check(wanted: Import, shape: Shape) -> None:
    _require_free_name(wanted)
    _require_none(wanted, Mismatch.of(shape, wanted.files).problems(dense=False))
    wanted.files.check_factors()


def _require_none(wanted: Import, problems: Iterable[str]) -> None:
    if found := list(problems):
        raise RunError(
            f"{WHO}: {wanted.files.folder}: {'; '.join(found)}; fetch the files again, or name a folder "
            "whose files belong to its config.json"
        )


def _require_free_name(wanted: Import) -> None:
    """Refuse to hide what is there: a finished checkpoint, or those of a job."""
    tracker = wanted.target / TRACKER
    if wanted.final.exists():
        raise RunError(f"{WHO}: {wanted.final} exists already; remove it, or name another folder")
    known = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else RELEASE
    if known != RELEASE:
        raise RunError(
            f"{WHO}: {wanted.target} has checkpoints of a job, the newest {known}, in whose place --load "
            "would take the imported one; name another folder"
        )


@contextlib.contextmanager
def _alone(wanted: Import) -> Iterator[None]:
    """Keep other imports out while all ranks write; the first one holds the lock."""
    lock, what = wanted.target / f".{RELEASE}.lock", f"{WHO}: {wanted.final}"
    sole = together(lambda: Sole(lock, what) if is_first() else None, WHO)
    try:
        yield
    finally:
        if sole is not None:
            sole.end()


def _begin(wanted: Import) -> None:
    _require_free_name(wanted)  # again: another import may have ended meanwhile
    delete(wanted.partial)  # of a killed one
    wanted.partial.mkdir(parents=True)


def _publish(wanted: Import) -> None:
    sync_tree(wanted.partial)
    # The tracker comes first: a folder that has its name is never left without it.
    write_atomically(wanted.target / TRACKER, RELEASE)
    os.rename(wanted.partial, wanted.final)
    sync(wanted.target)


# -- files of the checkpoint ---------------------------------------------------------------------


def _strategy(megatron: Megatron, wanted: Import, layers: int, progress: Progress) -> Any:
    """Return Megatron's strategy for sharded tensors, which makes each one when it is written."""
    torch_dist: Any = megatron("core.dist_checkpointing.strategies.torch")

    # Since 0.17 Megatron puts strategies aside that are not derived from its own.
    class Streaming(torch_dist.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
            items = together(lambda: list(_items(sharded_state_dict, megatron, wanted, layers)), WHO)
            save(Path(checkpoint_dir), items, progress)

    return Streaming("torch_dist", 1)


def _items(state: Any, megatron: Megatron, wanted: Import, layers: int) -> Iterator[Item]:
    """Yield everything that the checkpoint has, in an order that is the same on every rank."""
    mapping: Any = megatron("core.dist_checkpointing.mapping")
    for entry in _entries(state, mapping.ShardedObject, mapping.ShardedTensor):
        if isinstance(entry, mapping.ShardedObject):
            # In a list: Megatron reads as many objects of a name as it has.
            yield entry.unique_key, partial(list, [entry.data])
            continue
        ((_, (piece,)),) = pieces_of({"": entry}, megatron)
        if any(name not in wanted.files.names for name in piece.place.theirs(layers)):
            raise RunError(
                f"{WHO}: this release of Megatron builds {piece.place}, which the files of such a model do "
                "not have; report it, with config.json"
            )
        yield piece, partial(_read, piece, wanted.files, layers)


def _entries(state: Any, *kinds: type) -> list[Any]:
    if isinstance(state, kinds):
        return [state]
    children = state.values() if isinstance(state, Mapping) else state if isinstance(state, Sequence) else ()
    return [entry for child in children if not isinstance(child, str) for entry in _entries(child, *kinds)]


def _read(piece: Piece, files: Reader, layers: int) -> Tensor:
    return read_piece(piece, files, layers).view(piece.shape)


def save(folder: Path, items: Sequence[Item], progress: Progress) -> None:
    """Write a checkpoint's files by PyTorch's writer; each process writes a share, all call it together.

    Args:
        folder: the checkpoint's folder.
        items: regions, or names of objects, with functions that return them; the same in every process.
        progress: callback, as of :func:`run`.

    Raises:
        RunError: on all ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # A thread is lost with its error in a writer of several threads: each has writers of one.
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
        except RuntimeError as error:  # of torch's writer, in whose context is the system's
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
    """Yield neighbours that share a file."""
    ends = itertools.accumulate(map(_nbytes, items))
    numbered = zip(ends, items, strict=True)
    for _, part in itertools.groupby(numbered, lambda each: each[0] // _PART_BYTES):
        yield [item for _, item in part]


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Let ``torch.save`` leave out checksums, which take thrice the rest's time and nobody compares."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
