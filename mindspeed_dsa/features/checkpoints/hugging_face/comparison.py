"""Comparison of a model with the files of its weights: arguments, names and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face import config, mismatch
from mindspeed_dsa.features.checkpoints.hugging_face.files import WeightFiles
from mindspeed_dsa.features.checkpoints.hugging_face.names import REPEATED, Place, Shape
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import PADDED, Files, Piece
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs.files import RunError

_WHO = "mindspeed_dsa load-hf"
_SHOWN = 8
"""Names that a message lists of many."""


def weights_of(folder: Path) -> WeightFiles:
    """Return the weights of a model's folder, whose configuration may say what FP8's factors are.

    Raises:
        SettingsError: ``config.json`` cannot be read.
        RunError: files are missing or damaged.
    """
    return WeightFiles(folder, config.read_model(folder, _WHO)[0])


def problems(args: Any, folder: Path, release: str) -> Iterator[str]:
    """Yield how a model's files differ from a job's arguments: sizes, numbers, names of weights.

    Args:
        args: Megatron's, of the job.
        folder: of the files.
        release: of Megatron-core.
    """
    try:
        described, _ = config.read_model(folder, _WHO)
        arguments = config.arguments_of(described, f"{_WHO}: {folder / config.FILE}")
        yield from mismatch.mismatches(arguments, args, release)
        files = weights_of(folder)
    except (RunError, SettingsError) as error:
        yield str(error)
        return
    if hasattr(args, "num_layers"):
        found = difference(Shape.of(args), files)
        yield from found.problems(dense=mismatch.adds_indexers(arguments, args))


@dataclass(frozen=True)
class Difference:
    """Names that only one of a model and its files has.

    Attributes:
        missing: that the files lack, indexers' apart.
        unexpected: that the model does not have.
        indexers: layers, from 1, whose indexers the files lack.
        predictions: layers of multi-token prediction that only the files have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    indexers: tuple[int, ...]
    predictions: int

    def problems(self, dense: bool) -> Iterator[str]:
        """Yield sentences about what may not be.

        Args:
            dense: the files are of a model without indexers, which are initialised.
        """
        if self.missing:
            yield f"the files lack {listed(self.missing)}"
        if self.unexpected:
            yield f"the files have {listed(self.unexpected)}, which the model does not"
        if self.indexers and not dense:
            yield f"the files lack the indexers of layers {listed([str(layer) for layer in self.indexers])}"


def difference(shape: Shape, files: Files) -> Difference:
    """Compare the names of a model's tensors with those of its files."""
    there, wanted = frozenset(files.names), set[str]()
    missing, indexers = [], set[int]()
    for place in shape.places():
        names = place.theirs(shape.layers)
        wanted.update(names)
        lacking = [name for name in names if name not in there]
        if lacking and place.indexer:
            indexers.add(place.layer + 1 + (shape.layers if place.inner else 0))
        else:
            missing += lacking
    layers, own = shape.layers, len(shape.prediction_indexers)
    wanted |= {f"model.layers.{layers + layer}.{name}" for layer in range(own) for name in REPEATED}
    if shape.tied:
        wanted.add("lm_head.weight")
    more = there - wanted
    beyond = [number for number in files.predictions if number >= layers + own]
    left = tuple(f"model.layers.{number}." for number in beyond)
    unexpected = [name for name in more if not name.startswith(left)]
    return Difference(tuple(missing), tuple(sorted(unexpected)), tuple(sorted(indexers)), len(beyond))


def listed(names: Sequence[str]) -> str:
    """Return a few of many names, for a message."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def wrong_shapes(pieces: Iterable[Piece], files: Files, layers: int) -> Iterator[str]:
    """Yield a sentence for each tensor that has another shape in the files."""
    there, seen = frozenset(files.names), set[Place]()
    for piece in pieces:
        names = piece.place.theirs(layers)
        if piece.place in seen or any(name not in there for name in names):
            continue
        seen.add(piece.place)
        shapes = [tuple(files.shape(name)) for name in names]
        rows, rest = sum(shape[0] for shape in shapes), {shape[1:] for shape in shapes}
        enough = rows <= piece.whole[0] if piece.place.name in PADDED else rows == piece.whole[0]
        if rest != {piece.whole[1:]} or not enough:
            found = " and ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
            yield f"{piece.place} is {list(piece.whole)} here, and the files have {found}"
