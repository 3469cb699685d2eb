"""Contradictions in a model's folder: weights against ``config.json``, and weights against their copies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import (
    LAYERS,
    MODEL,
    PREDICTIONS,
)
from mindspeed_dsa.features.checkpoints.hugging_face.names import listed

if TYPE_CHECKING:
    from torch import Tensor

    from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
    from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape

_LAYER, _EXPERT = re.compile(r"^model\.layers\.\d+\."), re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_ROWS = 2**12
"""Rows of two tensors that are compared at once."""


def first_contradiction(files: Reader) -> str | None:
    """Return the first message of :func:`contradictions`; ``None`` if all shapes agree."""
    return next(contradictions(files), None)


def contradictions(files: Reader) -> Iterator[str]:
    """Yield a message for each weight with another shape than ``config.json`` states."""
    shapes = files.architecture.shapes
    for name in files.names:
        keys = shapes.get(_EXPERT.sub("{expert}", _LAYER.sub("", name)), ())
        stored = files.shape(name)
        expected = [_size(files.described, key) for key in keys]
        wrong = [
            f"{key} make {size}" if "*" in key or "+" in key else f"{key} is {size}"
            for key, size, found in zip(keys, expected, stored, strict=False)
            if size not in (None, found)
        ]
        if wrong:
            stated = " and ".join(wrong)
            yield f"{name} is {list(stored)}, and in config.json {stated} ({files.file(name)})"


def _size(described: Mapping[str, Any], keys: str) -> int | None:
    """Return the value of an expression of keys, such as ``a * (b + c)``; ``None`` if a key has no number."""
    size = 1
    for part in keys.split(" * "):
        values = [described.get(key) for key in part.strip("()").split(" + ")]
        numbers = [value for value in values if type(value) is int]
        if len(numbers) < len(values):
            return None
        size *= sum(numbers)
    return size


def layer_of(name: str) -> int:
    """Return the layer number in a Hugging Face tensor name, or -1 for tensors outside of layers."""
    _, found, rest = name.partition("model.layers.")
    number = rest.partition(".")[0]
    return int(number) if found and number.isdecimal() else -1


def layers_beyond(names: Iterable[str], shape: Shape, predictions: int) -> str:
    """Return a message about layers in the files that ``config.json`` does not count; empty if none.

    Args:
        names: names of the tensors in layers that are not counted.
        shape: layers of the model.
        predictions: number of multi-token prediction layers in the configuration.
    """
    layers = sorted({layer_of(name) for name in names})
    if not layers:
        return ""
    marks = tuple(name for parts in shape.architecture.tensors.prediction.values() for name in parts)
    key, count = LAYERS, layers[-1] + 1
    if any(name.endswith(marks) for name in names):
        key, count = PREDICTIONS, count - shape.layers
    numbers = listed([str(layer) for layer in layers])
    return (
        f"the files have layers {numbers}, counted from 0, and the model has {shape.layers} layers and "
        f"{predictions} of multi-token prediction: {key} in config.json would be {count}"
    )


def differing_copies(files: Reader, shape: Shape) -> Iterator[str]:
    """Yield a message for each weight that the files store twice with different values.

    Megatron has only one tensor for both, for example for tied embeddings.

    Args:
        files: weights of the model.
        shape: layers of the model.
    """
    ((embedding,), (head,)) = (
        MODEL[f"{name}.weight"] for name in ("embedding.word_embeddings", "output_layer")
    )
    copies = [*shape.repeated(), *([(head, embedding)] if shape.tied else [])]
    for copy, original in copies:
        original = original if original in files.names and not shape.tied else embedding
        if copy not in files.names or original not in files.names:
            continue
        if files.shape(copy) != files.shape(original) or not _same(files, copy, original):
            remedy = (
                "config.json has tie_word_embeddings true; correct it"
                if copy == head
                else "Megatron has one tensor for both; leave the layer out with a smaller --mtp-num-layers"
            )
            yield f"{copy} differs from {original}, and {remedy}"


def _same(files: Reader, copy: str, original: str) -> bool:
    rows = files.shape(copy)[0]
    for begin in range(0, rows, _ROWS):
        one, other = (files.read(name, begin, min(begin + _ROWS, rows)) for name in (copy, original))
        if not _equal(one, other):
            return False
    return True


def _equal(one: Tensor, other: Tensor) -> bool:
    return (
        bool((one == other).all()) if one.dtype == other.dtype else bool((one.float() == other.float()).all())
    )
