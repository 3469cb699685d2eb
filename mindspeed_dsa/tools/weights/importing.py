"""Hugging Face's files written as a checkpoint of Megatron's that ``--load`` takes under any layout."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.checkpoints.agreement import is_first, together
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
from mindspeed_dsa.features.checkpoints.hugging_face.mismatch import Mismatch, wrong_shapes
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import Piece, pieces_of, read_piece
from mindspeed_dsa.features.checkpoints.hugging_face.threads import in_threads
from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import (
    Saving,
    nbytes_of,
    without_checksums,
    write_item,
    write_object,
)
from mindspeed_dsa.runs.files import RunError, Sole, delete, sync, sync_tree, write_atomically
from mindspeed_dsa.runs.whole_checkpoints import RELEASE, TRACKER
from mindspeed_dsa.tools.weights.model import built

WHO = "mindspeed_dsa weights"
Progress = Callable[[int], Callable[[int], None]]


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


def _strategy(megatron: Megatron, wanted: Import, layers: int, progress: Progress) -> Any:
    """Return Megatron's strategy for sharded tensors, which makes each one when it is written."""
    torch_dist: Any = megatron("core.dist_checkpointing.strategies.torch")

    # Since 0.17 Megatron puts strategies aside that are not derived from its own.
    class Streaming(torch_dist.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
            saving = together(
                lambda: _saving(sharded_state_dict, Path(checkpoint_dir), megatron, wanted, layers), WHO
            )
            mine = saving.plans[dist.get_rank() :: dist.get_world_size()]

            def write() -> list[Any]:
                wrote, results = progress(sum(map(nbytes_of, mine))), []
                with without_checksums():
                    for plan, result in zip(mine, in_threads(saving.write, mine), strict=True):
                        results += result
                        wrote(nbytes_of(plan))
                return results

            results: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(results, together(write, WHO))
            together(lambda: saving.end(results) if is_first() else None, WHO)

    return Streaming("torch_dist", 1)


def _saving(state: Any, folder: Path, megatron: Megatron, wanted: Import, layers: int) -> Saving:
    """Plan everything that the checkpoint has, in an order that is the same on every rank."""
    mapping: Any = megatron("core.dist_checkpointing.mapping")
    items: list[tuple[WriteItem, Callable[[], Any]]] = []
    for entry in _entries(state, mapping.ShardedObject, mapping.ShardedTensor):
        if isinstance(entry, mapping.ShardedObject):
            # In a list: Megatron reads as many objects of a name as it has.
            items.append((write_object(entry.unique_key), partial(list, [entry.data])))
            continue
        ((_, (piece,)),) = pieces_of({"": entry}, megatron)
        if any(name not in wanted.files.names for name in piece.place.theirs(layers)):
            raise RunError(
                f"{WHO}: this release of Megatron builds {piece.place}, which the files of such a model do "
                "not have; report it, with config.json"
            )
        items.append((write_item(piece), partial(_read, piece, wanted.files, layers)))
    return Saving(folder, items)


def _read(piece: Piece, files: Reader, layers: int) -> Tensor:
    return read_piece(piece, files, layers).view(piece.shape)


def _entries(state: Any, *kinds: type) -> list[Any]:
    if isinstance(state, kinds):
        return [state]
    children = state.values() if isinstance(state, Mapping) else state if isinstance(state, Sequence) else ()
    return [entry for child in children if not isinstance(child, str) for entry in _entries(child, *kinds)]
