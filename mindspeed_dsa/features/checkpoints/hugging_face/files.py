"""Weights in a Hugging Face model folder.

The safetensors library checks the headers and maps the files into memory. A tensor's bytes are read on first
use, and their pages belong to the kernel's page cache, not to this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, KeysView, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindspeed_dsa.features.checkpoints.hugging_face import config, fp8
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import find
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import (
    LAYERS,
    PREDICTIONS,
    Architecture,
)
from mindspeed_dsa.features.checkpoints.hugging_face.config import INDEX, MOST_LAYERS, SINGLE
from mindspeed_dsa.features.checkpoints.hugging_face.names import listed
from mindspeed_dsa.runs.files import RunError

FACTORS = "_scale_inv"
"""Suffix of the factors' names of FP8 weights."""
FACTOR_DTYPES = (torch.float32, torch.float8_e8m0fnu)
"""Dtypes of factors in files. DeepSeek's files to V3.2 use fp32, even for powers of two."""
_LARGEST_BLOCK = 2**16


def weights_of(folder: Path, who: str = "mindspeed_dsa load-hf") -> Reader:
    """Open the weights of a model's folder, with the FP8 settings of its configuration.

    Raises:
        SettingsError: ``config.json`` cannot be read.
        RunError: files are missing or damaged.
    """
    return Reader(folder, config.read_model(folder, who)[0])


class Reader:
    """Weights in ``model.safetensors``, or in the files listed by ``model.safetensors.index.json``.

    Safe for use by several threads and by forked processes.

    Args:
        folder: folder of the model.
        described: content of its ``config.json``, for FP8 blocks and numbers of layers.

    Attributes:
        folder: folder of the model.
        quantised: ``quantization_config`` of the configuration.
        block: rows and columns of an FP8 block.
        predictions: layer numbers of the multi-token prediction layers.

    Raises:
        RunError: files are missing or damaged; the message lists all problems.
    """

    def __init__(self, folder: Path, described: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.folder = folder
        self._described = described
        problems: list[str] = []
        quantised = described.get("quantization_config") or {}
        self.quantised: Mapping[str, Any] = quantised if isinstance(quantised, dict) else {}
        block = self.quantised.get("weight_block_size") or list(fp8.BLOCK)
        if not _is_block(block):
            problems.append(f"config.json has a weight_block_size of {block!r}, which is no rows and columns")
            block = fp8.BLOCK
        self.block: tuple[int, int] = (block[0], block[1])
        layers, more = (_layers(described, name, problems) for name in (LAYERS, PREDICTIONS))
        self.predictions = range(layers, layers + more)
        tensors = _tensors(folder, problems)
        self._factors = {
            name.removesuffix(FACTORS): tensor for name, tensor in tensors.items() if name.endswith(FACTORS)
        }
        self._weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(FACTORS)}
        problems += self._wrong_factors()
        if problems:
            raise self._error(problems)

    @property
    def architecture(self) -> Architecture:
        """Architecture of the configuration.

        Raises:
            SettingsError: the model type is not supported.
        """
        return find(self._described, f"mindspeed_dsa: {self.folder / config.FILE}")

    @property
    def names(self) -> KeysView[str]:
        """Names of all weights, without the factors of FP8 weights."""
        return self._weights.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return tuple(self._weights[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a weight; ``float8_e4m3fn`` has factors, and is read as bf16."""
        return self._weights[name].dtype

    def factors(self, name: str) -> Tensor | None:
        """Return an FP8 weight's factors, fp32 ``[ceil(rows / 128), ceil(columns / 128)]``, else ``None``.

        Raises:
            RunError: a factor is not a positive number.
        """
        stored = self._factors.get(name)
        if stored is None:
            return None
        factors = stored.float()
        if wrong := fp8.wrong_factor(factors):
            raise self._error([f"{name}{FACTORS} holds {wrong}, which is no factor of an FP8 block"])
        return factors

    def factors_dtype(self, name: str) -> torch.dtype | None:
        """Return the stored dtype of a weight's factors; ``None`` unless FP8."""
        return self._factors[name].dtype if name in self._factors else None

    def check_factors(self) -> None:
        """Check the factors of all weights, which are 1 / 4096 of the weights' bytes.

        Raises:
            RunError: factors are not positive numbers; the message lists their weights.
        """
        # One fp32 factor per block: 4 bytes / (128 x 128 bytes) = 1 / 4096.
        checked = ((name, fp8.wrong_factor(each.float())) for name, each in self._factors.items())
        problems = [
            f"{name}{FACTORS} holds {wrong}, which is no factor of an FP8 block"
            for name, wrong in checked
            if wrong
        ]
        if problems:
            raise self._error(problems)

    def read(self, name: str, begin: int, end: int, columns: tuple[int, int] | None = None) -> Tensor:
        """Return rows of a weight in the stored dtype, in mapped memory.

        Args:
            name: name of the weight.
            begin: first row.
            end: row after the last one.
            columns: begin and end of a range of the second dimension; ``None``: all.
        """
        rows = self._weights[name][begin:end]
        return rows if columns is None else rows[:, slice(*columns)]

    def read_into(
        self, out: Tensor, name: str, begin: int = 0, columns: tuple[int, int] | None = None
    ) -> None:
        """Fill ``out`` with rows of a weight, cast to its dtype; FP8 weights are cast to bf16 first.

        Args:
            out: tensor to fill, of any dtype, strides and device; its first dimension is the number of rows.
            name: name of the weight.
            begin: first row.
            columns: begin and end of a range of the second dimension; ``None``: all.

        Raises:
            RunError: factors are not positive numbers.
            ValueError: the weight does not have these rows and columns.
        """
        rows = self.read(name, begin, begin + len(out), columns)
        if rows.shape != out.shape:
            raise ValueError(f"{list(out.shape)} cannot take {list(rows.shape)} of {name}")
        factors, out = self.factors(name), out.detach()
        if factors is None:
            out.copy_(rows)
        else:
            fp8.dequantise(rows, factors, out, begin, columns[0] if columns else 0, self.block)

    def _wrong_factors(self) -> Iterator[str]:
        """Yield problems with dtypes and shapes of FP8 weights and factors."""
        for name in self._factors:
            if name not in self._weights or self.dtype(name) != torch.float8_e4m3fn:
                yield f"{name}{FACTORS} has no weight in FP8 (F8_E4M3) to belong to"
        for name, weight in self._weights.items():
            if weight.dtype != torch.float8_e4m3fn:
                continue
            factors = self._factors.get(name)
            if factors is None:
                yield f"{name} is in FP8, and {name}{FACTORS} with its factors is not there"
            elif weight.dim() != 2:
                yield f"{name} is in FP8 and {list(weight.shape)}, which is no matrix"
            else:
                expected = fp8.factors_shape(tuple(weight.shape), self.block)
                if factors.dtype not in FACTOR_DTYPES or factors.shape != expected:
                    yield (
                        f"{name}{FACTORS} is {list(factors.shape)} in {factors.dtype}; blocks of "
                        f"{self.block[0]} x {self.block[1]} need {list(expected)} in "
                        f"{' or '.join(map(str, FACTOR_DTYPES))}"
                    )

    def _error(self, problems: list[str]) -> RunError:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        return RunError(
            f"mindspeed_dsa: the weights in {self.folder} cannot be used; fetch the files again, or name "
            f"another folder:{lines}"
        )


def _tensors(folder: Path, problems: list[str]) -> dict[str, Tensor]:
    """Return the tensors of a folder's files; append problems with files to ``problems``."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        # transformers would read the single file, but only the user knows which one is right.
        problems.append(f"there are both {SINGLE} and {INDEX}: remove the one that is not meant")
    elif index.exists():
        return _indexed(folder, _weight_map(index, problems), problems)
    elif single.exists():
        return _mapped(single, problems)
    else:
        problems.append(f"there is neither {SINGLE} nor {INDEX}")
    return {}


def _mapped(file: Path, problems: list[str]) -> dict[str, Tensor]:
    """Return the tensors of a file, in mapped memory."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dictionary
    except (SafetensorError, OSError, RuntimeError, AttributeError, ValueError) as error:
        problems.append(f"{file.name}: {error}")
        return {}


def _weight_map(index: Path, problems: list[str]) -> dict[str, str]:
    """Return the ``weight_map`` of an index: dict from tensor name to file name."""
    try:
        files = json.loads(index.read_bytes())["weight_map"]
        wrong = {repr(file) for file in files.values() if not _is_file_name(file)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(
            f"{index.name} has no weight_map, which says what file a tensor is in ({error!r:.200})"
        )
        return {}
    if wrong or not files:
        problems.append(
            f"{index.name} names {listed(sorted(wrong)) or 'nothing'}, which are no files of this folder"
        )
        return {}
    return dict(files)


def _is_file_name(value: Any) -> bool:
    # An index must not name files outside of its folder.
    return (
        isinstance(value, str)
        and value.isprintable()
        and value not in ("", "..")
        and Path(value).name == value
    )


def _indexed(folder: Path, files: Mapping[str, str], problems: list[str]) -> dict[str, Tensor]:
    """Return the tensors of the files that an index lists, and compare their names with it."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        names = {name for name, other in files.items() if other == file}
        if not (folder / file).exists():
            problems.append(f"{file} is not there; {INDEX} says that it holds {listed(sorted(names))}")
            continue
        before = len(problems)
        # A file that cannot be opened is one problem; its tensors are not listed as missing.
        held = _mapped(folder / file, problems)
        if len(problems) > before:
            continue
        if absent := sorted(names - held.keys()):
            problems.append(f"{file} does not hold {listed(absent)}, as {INDEX} says")
        if unknown := sorted(held.keys() - names):
            problems.append(f"{file} holds {listed(unknown)}, which {INDEX} does not say")
        tensors.update(held)
    return tensors


def _layers(described: Mapping[str, Any], name: str, problems: list[str]) -> int:
    """Return a number of layers from a configuration; append an invalid value to ``problems``."""
    value = described.get(name)
    if value is None:
        return 0
    if type(value) is int and 0 <= value <= MOST_LAYERS:
        return value
    problems.append(f"config.json has a {name} of {value!r}, which is no number of layers")
    return 0


def _is_block(block: Any) -> bool:
    """Return whether a value is a valid pair of block rows and columns."""
    sizes = block if isinstance(block, (list, tuple)) else ()
    return len(sizes) == 2 and all(type(each) is int and 0 < each <= _LARGEST_BLOCK for each in sizes)
