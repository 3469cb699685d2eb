"""Selections that somebody hands over, such as an inference engine, as one more file of a recording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.selection_rows import WrongRows
from mindspeed_dsa.runs.selections import Header, Key, Run, Writer, free_rank


class Handed(NamedTuple):
    """Selections of one sequence that somebody hands over, such as an inference engine.

    Attributes:
        step: from 1.
        sequence: of the step's global batch, from 0.
        array: ``[tokens, computing layers, topk]``, as :meth:`Recording.array` returns it; keys in any order.
        documents: position of the first token of each document, ascending from 0.
    """

    step: int
    sequence: int
    array: npt.NDArray[Any]
    documents: Sequence[int] = (0,)


def write_recording(folder: Path, header: Header, handed: Iterable[Handed]) -> Path:
    """Write selections that somebody hands over as one more file of a recording, and return its path.

    The new file replaces what the others say of the same rows.

    Args:
        folder: of the recording; made if need be.
        header: of the model.
        handed: the selections of each sequence.

    Raises:
        RunError: an array is not of this model, or of no integers, or a row lists what it does not see, or a
            key twice; nothing is left of the file then.
    """
    writer = Writer(folder, free_rank(folder), header)
    try:
        for each in handed:
            tokens, layers, topk = each.array.shape
            if layers != len(header.computing) or topk > header.topk:
                raise RunError(
                    f"step {each.step}, sequence {each.sequence}: selections are [{tokens}, {layers}, "
                    f"{topk}], and the model has {len(header.computing)} layers that select at most "
                    f"{header.topk} keys"
                )
            if each.array.dtype.kind not in "iu":
                raise RunError(
                    f"step {each.step}, sequence {each.sequence}: selections are {each.array.dtype}; hand "
                    "over positions as integers"
                )
            runs = [Run(a, a, b - a) for a, b in pairwise((*each.documents, tokens)) if b > a]
            for column, layer in enumerate(header.computing):
                try:
                    writer.append(Key(each.step, each.sequence, layer), runs, each.array[:, column])
                except WrongRows as error:
                    raise RunError(
                        f"step {each.step}, sequence {each.sequence}, layer {layer}: token {error.row} "
                        f"{error}"
                    ) from error
    except BaseException:
        writer.path.unlink()
        raise
    finally:
        writer.close()
    return writer.path
