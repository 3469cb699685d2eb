"""Hugging Face's files written as a checkpoint of Megatron's that ``--load`` takes under any layout."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.checkpoints.agreement import is_first, together
from mindspeed_dsa.features.checkpoints.hugging_face.comparison import difference, wrong_shapes
from mindspeed_dsa.features.checkpoints.hugging_face.files import stamps_of
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import Piece, bytes_of, pieces_of, read_piece
from mindspeed_dsa.features.checkpoints.hugging_face.shard_files import require_disk_space
from mindspeed_dsa.features.checkpoints.hugging_face.threads import in_threads, one_at_a_time
from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import (
    Item,
    share,
    without_checksums,
    write_index,
    write_part,
)
from mindspeed_dsa.runs.files import RunError, Sole, sweep, sync, sync_tree, write_atomically
from mindspeed_dsa.runs.whole_checkpoints import RELEASE, TRACKER
from mindspeed_dsa.tools.weights.model import built

WHO = "mindspeed_dsa weights"
_PART_BYTES = 2**29


@dataclass(frozen=True)
class Import:
    """A model to be imported.

    Attributes:
        files: Hugging Face's.
        source: their folder.
        target: folder of checkpoints.
        values: Megatron's arguments of the model.
        vocabulary: padded.
        dtype: of the weights in the checkpoint.
        saved: arguments that the checkpoint remembers.
    """

    files: Any
    source: Path
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

    @property
    def lock(self) -> Path:
        """File that whoever writes it holds."""
        return self.target / f".{RELEASE}.lock"

    @property
    def record(self) -> Path:
        """File beside that folder, which says of what it is."""
        return self.target / f".{RELEASE}.json"

    def mark(self) -> dict[str, Any]:
        """Return what makes files of an interrupted import the same as those of this one."""
        return {
            "files": stamps_of(self.source),
            "values": {name: str(value) for name, value in sorted(self.values.items())},
            "vocabulary": self.vocabulary,
            "dtype": str(self.dtype),
            "torch": torch.__version__,
        }


def run(wanted: Import, progress: Callable[[int], Callable[[int], None]]) -> None:
    """Write the checkpoint; with several processes, which have a group, each writes a share of its files.

    Args:
        wanted: what is to be imported.
        progress: called with all bytes that this process writes; what it returns is called with each part.

    Raises:
        RunError: the files do not fit, there is no room, something has that name already, or another process
            writes it.
    """
    shape = Shape.of(argparse.Namespace(**wanted.values))
    together(lambda: _check(wanted, shape), WHO)
    with _alone(wanted):
        _write(wanted, shape, progress)


def _write(wanted: Import, shape: Shape, progress: Callable[[int], Callable[[int], None]]) -> None:
    with built(wanted.values, wanted.vocabulary, wanted.dtype) as model:
        megatron = Megatron()
        state = model.sharded_state_dict()
        pieces = [piece for _, each in pieces_of(state, megatron) for piece in each]
        together(lambda: _require_none(wanted, wrong_shapes(pieces, wanted.files, shape.layers)), WHO)
        strategy = _Streaming.of(megatron, wanted, shape.layers, progress)
        common = {"args": wanted.saved, "iteration": 0, "checkpoint_version": 3.0}
        together(lambda: _begin(wanted, bytes_of(pieces)) if is_first() else None, WHO)
        megatron("core.dist_checkpointing").save({**state, **common}, str(wanted.partial), strategy)
        together(lambda: _publish(wanted) if is_first() else None, WHO)


def _check(wanted: Import, shape: Shape) -> None:
    _require_room_for_name(wanted)
    _require_none(wanted, difference(shape, wanted.files).problems(dense=False))
    wanted.files.check_factors()


def _require_none(wanted: Import, problems: Iterable[str]) -> None:
    if found := list(problems):
        raise RunError(
            f"{WHO}: {wanted.source}: {'; '.join(found)}; fetch the files again, or name a folder whose "
            "files belong to its config.json"
        )


def _require_room_for_name(wanted: Import) -> None:
    """Refuse to hide what is there: a finished checkpoint, or those of a job."""
    tracker = wanted.target / TRACKER
    if wanted.final.exists():
        raise RunError(
            f"mindspeed_dsa weights: {wanted.final} exists already; remove it, or name another folder"
        )
    known = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else RELEASE
    if known != RELEASE:
        raise RunError(
            f"mindspeed_dsa weights: {wanted.target} has checkpoints of a job, the newest {known}, "
            "in whose place --load would take the imported one; name another folder"
        )


@contextlib.contextmanager
def _alone(wanted: Import) -> Iterator[None]:
    """Keep other imports out while all ranks write; the first one holds the lock."""
    sole = together(lambda: Sole(wanted.lock, f"{WHO}: {wanted.final}") if is_first() else None, WHO)
    try:
        yield
    finally:
        if sole is not None:
            sole.end()


def _begin(wanted: Import, needed: int) -> None:
    """Make the folder, or go on with that of an interrupted import of the same model."""
    _require_room_for_name(wanted)  # again: another import may have ended meanwhile
    mark, known = json.dumps(wanted.mark()), wanted.record
    goes_on = known.exists() and known.read_text(encoding="utf-8") == mark
    if wanted.partial.exists() and not goes_on:
        shutil.rmtree(wanted.partial)
    sweep(wanted.partial)
    there = sum(path.stat().st_size for path in wanted.partial.rglob("*") if path.is_file())
    require_disk_space(wanted.target, needed - there)
    wanted.partial.mkdir(parents=True, exist_ok=True)
    write_atomically(known, mark)


def _publish(wanted: Import) -> None:
    sync_tree(wanted.partial)
    # The tracker comes first: a folder that has its name is never left without it.
    write_atomically(wanted.target / TRACKER, RELEASE)
    os.rename(wanted.partial, wanted.final)
    wanted.record.unlink()
    sync(wanted.target)


class _Streaming:
    """Megatron's strategy for sharded tensors, which makes each one when it is written."""

    @staticmethod
    def of(
        megatron: Megatron,
        wanted: Import,
        layers: int,
        progress: Callable[[int], Callable[[int], None]],
    ) -> Any:
        """Return it; the class has to be derived from Megatron's, which since 0.17 puts others aside."""
        torch_dist: Any = megatron("core.dist_checkpointing.strategies.torch")

        class Streaming(torch_dist.TorchDistSaveShardedStrategy):
            def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
                items = _items(sharded_state_dict, megatron, wanted, layers)
                folder = Path(checkpoint_dir)
                rank = dist.get_rank()
                parts = share(items, rank, dist.get_world_size(), _PART_BYTES)

                def write() -> None:
                    total = sum(item.bytes for part in parts.values() for item in part)
                    wrote = one_at_a_time(progress(total))
                    with without_checksums():
                        in_threads(lambda part: write_part(folder, *part, wrote), parts.items())

                together(write, WHO)
                together(lambda: write_index(folder) if rank == 0 else None, WHO)

        return Streaming("torch_dist", 1)


def _items(state: Any, megatron: Megatron, wanted: Import, layers: int) -> list[Item]:
    """List everything that the checkpoint has, in an order that is the same on every rank."""
    mapping: Any = megatron("core.dist_checkpointing.mapping")
    there, items = frozenset(wanted.files.names), list[Item]()
    for entry in _entries(state, mapping.ShardedObject, mapping.ShardedTensor):
        if isinstance(entry, mapping.ShardedObject):
            items.append(Item(entry.unique_key, partial(_as_saved, entry)))
            continue
        ((_, (piece,)),) = pieces_of({"": entry}, megatron)
        if not there.issuperset(piece.place.theirs(layers)):
            raise RunError(
                f"mindspeed_dsa weights: this release of Megatron builds {piece.place}, which the files of "
                "such a model do not have; report it, with config.json"
            )
        items.append(_item(piece, wanted, layers))
    return items


def _as_saved(entry: Any) -> list[Any]:
    """Return an object as Megatron saves it, which reads as many of a name as it has."""
    return [entry.data]


def _entries(state: Any, *kinds: type) -> list[Any]:
    if isinstance(state, kinds):
        return [state]
    children = state.values() if isinstance(state, Mapping) else state if isinstance(state, Sequence) else ()
    return [entry for child in children if not isinstance(child, str) for entry in _entries(child, *kinds)]


def _item(piece: Piece, wanted: Import, layers: int) -> Item:
    dtype = piece.data.dtype

    def make() -> Tensor:
        out = torch.empty(piece.data.shape, dtype=dtype, device="cpu")
        read_piece(out, piece, wanted.files, layers)
        return out.view(piece.shape)

    return Item(piece.key, make, piece.shape, piece.offset, piece.size, dtype, bytes_of([piece]))
