"""Checks of a Hugging Face model's files: names, shapes, factors and numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.checkpoints.hugging_face import config
from mindspeed_dsa.features.checkpoints.hugging_face.contradictions import contradictions, differing_copies
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader, weights_of
from mindspeed_dsa.features.checkpoints.hugging_face.mismatch import Mismatch, wrong_shapes
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape, listed
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import in_threads, pieces_of
from mindspeed_dsa.runs.files import RunError, amount
from mindspeed_dsa.tools.weights.importing import WHO, Progress
from mindspeed_dsa.tools.weights.model import built


@dataclass
class Check:
    """Check of a model's folder, which reads every weight once.

    Attributes:
        folder: folder of the model.
        progress: function called with the bytes of all weights; returns a callback for the bytes of each
            weight.
        read: description of the weights that were read.
        notes: differences that are no problem.
    """

    folder: Path
    progress: Progress
    read: str = ""
    notes: list[str] = field(default_factory=list)

    def problems(self) -> Iterator[str]:
        """Yield a message for each problem, as soon as it is found.

        Raises:
            SettingsError: ``config.json`` cannot be read, or its model is not supported.
        """
        described, lacking = config.read_model(self.folder, WHO)
        if lacking:  # transformers does not save them
            more = f"{lacking} more layers of multi-token prediction"
            self.notes.append(f"{config.FILE} speaks of {more}, which the files lack")
        values = config.arguments_of(described, f"{WHO}: {self.folder / config.FILE}")
        try:
            files = weights_of(self.folder, WHO)
        except RunError as error:
            yield str(error)
            return
        sizes = {name: math.prod(files.shape(name)) * files.dtype(name).itemsize for name in files.names}
        self.read = f"{amount(sum(sizes.values()))} in {len(sizes)} weights"
        yield from self._structure(values, files)
        yield from files.wrong_factors()
        wrote = self.progress(sum(sizes.values()))
        for name, _ in zip(sizes, in_threads(files.count, sizes), strict=True):
            wrote(sizes[name])
            if count := files.non_finite[name]:
                numbers = math.prod(files.shape(name))
                yield f"{name} in {files.file(name)}: {count} of {numbers} numbers are NaN or infinite"

    def _structure(self, values: Mapping[str, Any], files: Reader) -> Iterator[str]:
        """Yield tensor names and shapes in the files that differ from the model of ``config.json``."""
        shape = Shape.of(argparse.Namespace(**values), files.architecture)
        gaps = Mismatch.of(shape, files)
        if gaps.unexpected:
            names = [f"{name} in {files.file(name)}" for name in gaps.unexpected]
            yield f"the files have {listed(names)}, which the model of {config.FILE} does not"
        yield from replace(gaps, unexpected=()).problems(dense=False)
        self.notes += gaps.notes()
        yield from differing_copies(files, shape)
        wrong = list(contradictions(files))
        yield from wrong
        if wrong:
            return
        with built(values, values["vocab_size"], torch.bfloat16) as model:
            megatron = Megatron()
            pieces = (piece for _, each in pieces_of(model.sharded_state_dict(), megatron) for piece in each)
            yield from wrong_shapes(pieces, files, shape, f"by {config.FILE}")
