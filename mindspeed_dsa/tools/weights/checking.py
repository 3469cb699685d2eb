"""Checks of a Hugging Face model's files: names, shapes, factors and numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.checkpoints.hugging_face import config
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import MODEL
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader, weights_of
from mindspeed_dsa.features.checkpoints.hugging_face.mismatch import Mismatch, wrong_shapes
from mindspeed_dsa.features.checkpoints.hugging_face.names import PADDED, Shape, listed
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import in_threads, pieces_of
from mindspeed_dsa.runs.files import RunError, amount
from mindspeed_dsa.tools.weights.importing import WHO, Progress
from mindspeed_dsa.tools.weights.model import built


@dataclass
class Check:
    """Check of a model's folder, which reads every weight once.

    Attributes:
        folder: folder of the model.
        progress: function called with the bytes of all weights; returns a callback for the bytes of each.
        read: description of the weights that were read.
        lacking: number of multi-token prediction layers in ``config.json`` without weights, as transformers
            saves a model.
    """

    folder: Path
    progress: Progress
    read: str = ""
    lacking: int = 0

    def problems(self) -> Iterator[str]:
        """Yield a message for each problem, as soon as it is found.

        Raises:
            SettingsError: ``config.json`` cannot be read, or its model is not supported.
        """
        described, self.lacking = config.read_model(self.folder, WHO)
        values = config.arguments_of(described, f"{WHO}: {self.folder / config.FILE}")
        try:
            files = weights_of(self.folder, WHO)
        except RunError as error:
            yield str(error)
            return
        sizes = {name: math.prod(files.shape(name)) * files.dtype(name).itemsize for name in files.names}
        self.read = f"{amount(sum(sizes.values()))} in {len(sizes)} weights"
        yield from _structure(values, files)
        yield from files.wrong_factors()
        wrote = self.progress(sum(sizes.values()))
        for name, _ in zip(sizes, in_threads(files.count, sizes), strict=True):
            wrote(sizes[name])
            if count := files.non_finite[name]:
                numbers = math.prod(files.shape(name))
                yield f"{name} in {files.file(name)}: {count} of {numbers} numbers are NaN or infinite"


def _structure(values: Mapping[str, Any], files: Reader) -> Iterator[str]:
    """Yield differences of names and shapes from the model of the configuration."""
    shape = Shape.of(argparse.Namespace(**values), files.architecture)
    gaps = Mismatch.of(shape, files)
    if gaps.unexpected:
        names = [f"{name} in {files.file(name)}" for name in gaps.unexpected]
        yield f"the files have {listed(names)}, which the model of {config.FILE} does not"
    yield from replace(gaps, unexpected=()).problems(dense=False)
    vocabulary = values["vocab_size"]
    with built(values, vocabulary, torch.bfloat16) as model:
        megatron = Megatron()
        pieces = (piece for _, each in pieces_of(model.sharded_state_dict(), megatron) for piece in each)
        yield from wrong_shapes(pieces, files, shape, f"by {config.FILE}")
    # A model in training may have more rows than its files. These files are compared with themselves.
    for name in (name for padded in PADDED for name in MODEL[padded] if name in files.names):
        if (rows := files.shape(name)[0]) < vocabulary:
            stated = f"{config.FILE} a vocab_size of {vocabulary}"
            yield f"{name} in {files.file(name)} has {rows} rows, and {stated}"
