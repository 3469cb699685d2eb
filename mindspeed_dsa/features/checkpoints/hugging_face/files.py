"""Weights in a Hugging Face model folder.

The safetensors library checks the headers and maps the files into memory. A tensor's bytes are read on first
use, and their pages belong to the kernel's page cache, not to this process.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, KeysView, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindspeed_dsa.features.checkpoints.hugging_face import config, fp8, layouts
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import BY_TYPE, find
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import (
    LAYERS,
    PREDICTIONS,
    Architecture,
)
from mindspeed_dsa.features.checkpoints.hugging_face.config import INDEX, MOST_LAYERS, SINGLE
from mindspeed_dsa.features.checkpoints.hugging_face.names import listed
from mindspeed_dsa.runs.files import RunError

_IN_LAYER = re.compile(r"(?P<layer>model\.layers\.\d+\.)(?P<name>.+?)(?P<factors>_scale_inv)?")
_CHUNK = 2**20
"""Elements that are copied and then counted: 2 MiB in bf16, still in a cache after the copy."""


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
        described: content of the model's ``config.json``.
        quantised: ``quantization_config`` of the configuration.
        predictions: layer numbers of the multi-token prediction layers.
        non_finite: counts of NaN and infinities among the numbers read so far, by name of weight.

    Raises:
        RunError: files are missing or damaged, or store weights in a layout that is not read; the message
            lists all problems.
    """

    def __init__(self, folder: Path, described: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.folder = folder
        self.described = described
        problems: list[str] = []
        quantised = described.get("quantization_config") or {}
        self.quantised: Mapping[str, Any] = quantised if isinstance(quantised, dict) else {}
        stated = layouts.block_of(self.quantised)
        if stated is not None and not layouts.is_block(stated):
            problems.append(
                f"config.json has a weight_block_size of {stated!r}, which is no rows and columns"
            )
            stated = None
        block = fp8.BLOCK if stated is None else (stated[0], stated[1])
        layers, more = (_layers(described, name, problems) for name in (LAYERS, PREDICTIONS))
        self.predictions = range(layers, layers + more)
        self.non_finite = Counter[str]()
        self._lock = threading.Lock()
        architecture = BY_TYPE.get(str(described.get("model_type")))
        tensors, self._files = _with_names_of_files(*_tensors(folder, problems), architecture, problems)
        cache = bool(self.quantised.get("kv_cache_scheme"))
        by_use = layouts.sort(tensors, block, stated is not None, cache)
        if transforms := layouts.transforms(self.quantised):
            # A transform of activations undoes one of the weights, and Megatron has none.
            layout = "weights under a transform (compressed-tensors' transform_config)"
            by_use.unread[layout] = transforms
        if by_use.unread:
            raise self._error(
                [f"{layout}: {listed(names)}" for layout, names in by_use.unread.items()],
                "are stored in a layout that is not read; name a folder with this model in bf16, or in "
                "FP8 (e4m3) with a factor for each block, row or tensor",
            )
        self._factors, self._weights = by_use.factors, by_use.weights
        problems += by_use.problems
        if problems:
            raise self._error(problems)

    @property
    def architecture(self) -> Architecture:
        """Architecture that the model's ``config.json`` names.

        Raises:
            SettingsError: the model type is not supported.
        """
        return find(self.described, f"mindspeed_dsa: {self.folder / config.FILE}")

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

    def file(self, name: str) -> str:
        """Return the name of the file that a weight is in."""
        return self._files[name]

    def factors(self, name: str) -> Tensor | None:
        """Return an FP8 weight's factors, fp32 ``[rows of blocks, columns of blocks]``, else ``None``.

        Raises:
            RunError: a factor cannot be used.
        """
        stored = self._factors.get(name)
        if stored is None:
            return None
        if wrong := self._wrong(name):
            raise self._error([wrong])
        return stored.stored.float()

    def factors_dtype(self, name: str) -> torch.dtype | None:
        """Return the stored dtype of a weight's factors; ``None`` unless FP8."""
        return self._factors[name].stored.dtype if name in self._factors else None

    def block(self, name: str) -> tuple[int, int] | None:
        """Return rows and columns of a weight's FP8 block, which shares one factor; ``None`` unless FP8."""
        return self._factors[name].block if name in self._factors else None

    def check_factors(self) -> None:
        """Check the factors of all weights, which are 1 / 4096 of the weights' bytes.

        Raises:
            RunError: factors cannot be used; the message lists them.
        """
        # One fp32 factor per block: 4 bytes / (128 x 128 bytes) = 1 / 4096.
        if problems := list(self.wrong_factors()):
            raise self._error(problems)

    def wrong_factors(self) -> Iterator[str]:
        """Yield a message for each weight with factors that cannot be used."""
        yield from filter(None, map(self._wrong, self._factors))

    def _wrong(self, name: str) -> str | None:
        """Return a message for a weight with factors that cannot be used; ``None`` if all can."""
        factors = self._factors[name]
        wrong = fp8.wrong_factor(factors.stored.float(), self._weights[name], factors.block)
        file = self._files[factors.name]
        return wrong and f"{factors.name} holds {wrong} in {file}, which is no factor of an FP8 block"

    def require_finite(self, who: str) -> None:
        """Refuse the files if NaN or infinities were among the numbers read so far.

        Args:
            who: prefix of the error message.

        Raises:
            RunError: names the weights, their files and counts.
        """
        if self.non_finite:
            found = [f"{name} ({count} in {self.file(name)})" for name, count in self.non_finite.items()]
            raise RunError(
                f"{who}: the weights in {self.folder} have NaN or infinities: {listed(found)}; fetch these "
                "files again, or name weights from before training diverged; `weights check` lists all"
            )

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
        if factors is not None:
            first_column, block = columns[0] if columns else 0, self._factors[name].block
            count = fp8.dequantise(rows, factors, out, begin, first_column, block)
            # Products fit bf16, and may not fit fp16.
            self._count(name, non_finite(out) if out.dtype == torch.float16 else count)
            return
        at_once = max(1, _CHUNK // max(1, math.prod(out.shape[1:])))
        for into, part in zip(out.split(at_once), rows.split(at_once), strict=True):
            into.copy_(part)
            # A cast to a smaller dtype can give infinities, so its result is counted where it can be read.
            self._count(name, non_finite(into if into.device.type == "cpu" else part))

    def count(self, name: str, rows: Tensor | None = None) -> None:
        """Add the number of NaN and infinities in a weight, or in ``rows`` of it, to :attr:`non_finite`."""
        self._count(name, non_finite(self._weights[name] if rows is None else rows))

    def _count(self, name: str, count: int) -> None:
        if count:
            with self._lock:
                self.non_finite[name] += count

    def _error(
        self,
        problems: list[str],
        remedy: str = "cannot be used; fetch the files again, or name another folder",
    ) -> RunError:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        return RunError(f"mindspeed_dsa: the weights in {self.folder} {remedy}:{lines}")


def non_finite(numbers: Tensor) -> int:
    """Count NaN and infinities in a CPU tensor, in chunks of about 2^20 elements."""
    if numbers.numel() == 0:
        return 0
    numbers = numbers.reshape(1) if numbers.dim() == 0 else numbers
    count, at_once = 0, max(1, _CHUNK * len(numbers) // numbers.numel())
    for part in numbers.split(at_once):
        if part.dtype == torch.float8_e4m3fn:  # has NaN, all bits but the sign's, and no infinities
            bits = part.view(torch.int8) & 0x7F
            # The sum of booleans is slow, and seldom needed.
            count += int((bits == 0x7F).sum()) if int(bits.max()) == 0x7F else 0
            continue
        # The extremes are NaN if any number is. Their difference is finite, or the exact count decides.
        least, largest = part.aminmax()
        if not math.isfinite(largest - least):
            count += int(part.isfinite().logical_not_().sum())
    return count


def _tensors(folder: Path, problems: list[str]) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Return the tensors of a folder's files, and the file of each; append problems to ``problems``."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        # transformers would read the single file, but only the user knows which one is right.
        problems.append(f"there are both {SINGLE} and {INDEX}: remove the one that is not meant")
    elif index.exists():
        files = _weight_map(index, problems)
        return _indexed(folder, files, problems), files
    elif single.exists():
        tensors = _mapped(single, problems)
        return tensors, dict.fromkeys(tensors, SINGLE)
    else:
        problems.append(f"there is neither {SINGLE} nor {INDEX}")
    return {}, {}


def _with_names_of_files(
    tensors: Mapping[str, Tensor],
    files: Mapping[str, str],
    architecture: Architecture | None,
    problems: list[str],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Replace tensors that have the names of transformers' model by views with the names of its files.

    A tensor that fuses all experts of a layer has a view per expert and projection.
    """
    in_memory = {} if architecture is None else architecture.tensors.in_memory
    named, places = dict[str, Tensor](), dict[str, str]()
    for name, tensor in tensors.items():
        matched, views = _IN_LAYER.fullmatch(name), {name: tensor}
        if architecture and matched and matched["name"] in in_memory:
            parts = architecture.tensors.layer.get(in_memory[matched["name"]], ())
            views = _views(parts, tensor) or {matched["name"]: tensor}
            views = {
                f"{matched['layer']}{part}{matched['factors'] or ''}": view for part, view in views.items()
            }
        if doubled := [view for view in views if view != name and view in tensors]:
            problems.append(f"{name} holds {listed(doubled)}, which is there by itself too")
        named |= views
        places |= dict.fromkeys(views, files.get(name, ""))  # an index may lack a name
    return named, places


def _views(parts: tuple[str, ...], tensor: Tensor) -> dict[str, Tensor]:
    """Return views of a tensor by the names of its parts in a layer; empty if it does not have them."""
    if not any("{expert}" in part for part in parts):
        return dict.fromkeys(parts, tensor)
    if tensor.dim() != 3 or not tensor.numel():
        return {}
    # gate_up_proj is [experts, 2 x width, hidden], with the gate's rows first.
    return {
        part.format(expert=expert): rows
        for expert, weight in enumerate(tensor)
        for part, rows in zip(parts, weight.tensor_split(len(parts)), strict=True)
    }


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
