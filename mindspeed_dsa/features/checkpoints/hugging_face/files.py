"""Weights in a Hugging Face model folder, read by slices.

A file holds the length of its header, the header in JSON, and the tensors' bytes
(https://huggingface.co/docs/safetensors). The library of that name maps whole files, which makes the pages of
all tensors part of a process's memory; here every read names its place in the file, so that memory holds the
slice that is asked for and one buffer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.features.checkpoints.hugging_face import fp8
from mindspeed_dsa.features.checkpoints.hugging_face.config import (
    INDEX,
    LARGEST_HEADER,
    LAYERS,
    LENGTH,
    MOST_LAYERS,
    PREDICTIONS,
    SINGLE,
)
from mindspeed_dsa.runs.files import RunError

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in headers, in the order in which the safetensors library lays tensors into a file."""
FACTORS = "_scale_inv"
"""End of the names of FP8 weights' factors."""
FACTOR_DTYPES = (torch.float32, torch.float8_e8m0fnu)
"""Dtypes that files have factors in: DeepSeek's to V3.2 in fp32, also those that are powers of two."""
_BUFFER = 2**22
_LARGEST_BLOCK = 2**16
_MENTIONED = 5  # names in one problem; there can be tens of thousands


class _DamagedError(Exception):
    """A file that cannot be used as it is; says why."""


@dataclass(frozen=True)
class _Part:
    """A tensor in a file, or what one index of its first dimension leaves of it.

    Attributes:
        offset: of its first byte in the file.
        factors: of FP8 blocks.
    """

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    factors: _Part | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def at(self, index: int) -> _Part:
        rest = self.shape[1:]
        offset = self.offset + index * math.prod(rest) * self.dtype.itemsize
        return _Part(self.file, offset, self.dtype, rest, self.factors and self.factors.at(index))


class WeightFiles:
    """Weights in ``model.safetensors``, or in the files that ``model.safetensors.index.json`` names.

    Only the index and the files' headers are read when it is made. It holds neither open files nor positions,
    so threads and forked processes share it freely.

    Args:
        folder: the model's.
        described: content of its ``config.json``, as far as it speaks of FP8 and of layers.

    Attributes:
        folder: the model's.
        quantised: what the configuration says of FP8.
        block: rows and columns of an FP8 block.
        predictions: numbers of the layers of multi-token prediction.

    Raises:
        RunError: files are missing or damaged; the message lists every problem of them.
    """

    def __init__(self, folder: Path, described: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.folder = folder
        problems: list[str] = []
        quantised = described.get("quantization_config") or {}
        self.quantised: Mapping[str, Any] = quantised if isinstance(quantised, dict) else {}
        block = self.quantised.get("weight_block_size") or list(fp8.BLOCK)
        if not (isinstance(block, list) and len(block) == 2 and _counts(block) and _may_be(block)):
            problems.append(f"config.json has a weight_block_size of {block!r}, which is no rows and columns")
            block = list(fp8.BLOCK)
        self.block: tuple[int, int] = (block[0], block[1])
        layers, more = (_layers(described, name, problems) for name in (LAYERS, PREDICTIONS))
        self.predictions = range(layers, layers + more)
        parts = _parts(folder, problems)
        self._parts = dict(_with_factors(parts, self.block, problems))
        if problems:
            raise self._error(problems)

    @property
    def names(self) -> KeysView[str]:
        """Names of weights; the factors of FP8 blocks belong to their weight and have none here."""
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape."""
        return self._parts[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a weight's dtype in the file; ``float8_e4m3fn`` has factors, and is read as bf16."""
        return self._parts[name].dtype

    def factors(self, name: str) -> Tensor | None:
        """Return a weight's factors ``[..., ceil(rows / 128), ceil(columns / 128)]``; none unless FP8.

        Factors come in fp32, whatever they are in the file.

        Raises:
            RunError: one of them is no positive number.
        """
        part = self._parts[name].factors
        try:
            return None if part is None else self._checked_factors(name, part)
        except (_DamagedError, OSError) as error:
            raise self._error([str(error)]) from error

    def factors_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a weight's factors in the file; none unless FP8."""
        part = self._parts[name].factors
        return None if part is None else part.dtype

    def check_factors(self) -> None:
        """Look at the factors of all weights, a 4096th of their bytes.

        Raises:
            RunError: some are no positive numbers; the message lists the weights.
        """
        problems = []
        for name, part in self._parts.items():
            try:
                if part.factors is not None:
                    self._checked_factors(name, part.factors)
            except (_DamagedError, OSError) as error:
                problems.append(str(error))
        if problems:
            raise self._error(problems)

    def read_into(
        self, out: Tensor, name: str, begin: int = 0, columns: tuple[int, int] | None = None
    ) -> None:
        """Fill a tensor with as many rows of a weight as it has, cast to its dtype; FP8 by way of bf16.

        Beside ``out`` it needs some MiB.

        Args:
            out: of any dtype, strides and device.
            name: the weight's.
            begin: first of the rows.
            columns: begin and end of a range of the second dimension; ``None`` for all.

        Raises:
            RunError: the file ends too early, or factors are no positive numbers.
            ValueError: the weight has no such rows and columns.
        """
        part = self._parts[name]
        shape = _shape_of(name, part, begin, begin + len(out) if out.dim() else None, columns)
        if tuple(out.shape) != shape:
            raise ValueError(f"{list(out.shape)} cannot take {list(shape)} of {name}")
        try:
            with open(part.file, "rb", buffering=0) as file:
                self._fill(out.detach(), name, part, begin, columns, file.fileno())
        except (_DamagedError, OSError) as error:
            raise self._error([str(error)]) from error

    def _fill(
        self,
        out: Tensor,
        name: str,
        part: _Part,
        begin: int,
        columns: tuple[int, int] | None,
        descriptor: int,
    ) -> None:
        """Fill ``out`` from an open file with a part that has these rows and columns."""
        if out.numel() == 0:
            return
        if out.dim() == 0:
            out = out.view(1)
            part = _Part(part.file, part.offset, part.dtype, (1,))
        row = math.prod(part.shape[1:]) * part.dtype.itemsize
        first, last = columns or (0, part.shape[1] if len(part.shape) > 1 else 1)
        whole = len(part.shape) < 2 or last - first == part.shape[1]
        if whole and out.dtype == part.dtype and out.device.type == "cpu" and out.is_contiguous():
            _read_exactly(descriptor, out, part.offset + begin * row, part.file)
            return
        if len(part.shape) > 2 or (row > _BUFFER and part.factors is None):
            for number, rows in enumerate(out):
                self._fill(rows, name, part.at(begin + number), first, None, descriptor)
            return
        factors = None if part.factors is None else self._checked_factors(name, part.factors)
        at_once = max(1, _BUFFER // row)
        # Whole rows, also where only some columns are wanted: the gaps are smaller than what is read ahead.
        buffer = torch.empty(min(at_once, len(out)), *part.shape[1:], dtype=part.dtype)
        for done in range(0, len(out), at_once):
            into = out[done : done + at_once]
            rows = buffer[: len(into)]
            _read_exactly(descriptor, rows, part.offset + (begin + done) * row, part.file)
            wanted = rows if whole else rows[:, first:last]
            if factors is None:
                into.copy_(wanted)
            else:
                fp8.dequantise(wanted, factors, into, begin + done, first, self.block)

    def _checked_factors(self, name: str, part: _Part) -> Tensor:
        stored = torch.empty(part.shape, dtype=part.dtype)
        with open(part.file, "rb", buffering=0) as file:
            _read_exactly(file.fileno(), stored, part.offset, part.file)
        factors = stored.float()
        if wrong := fp8.wrong_factor(factors):
            raise _DamagedError(
                f"{part.file.name}: {name}{FACTORS} holds {wrong}, which is no factor of an FP8 block"
            )
        return factors

    def _error(self, problems: list[str]) -> RunError:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        return RunError(
            f"mindspeed_dsa: the weights in {self.folder} cannot be used; fetch the files again, or name "
            f"another folder:{lines}"
        )


def stamps_of(folder: Path) -> dict[str, list[int]]:
    """Return size and time of a model's files by name, by which others in their place are told apart."""
    found = {path.name: path.stat() for path in sorted(folder.glob("*.safetensors"))}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


# -- headers -----------------------------------------------------------------------------------


def _parts(folder: Path, problems: list[str]) -> dict[str, _Part]:
    """Return the tensors of a folder's files; what is wrong with files goes to ``problems``."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        # transformers would read the single one; which was meant, only the user knows.
        problems.append(f"there are both {SINGLE} and {INDEX}: remove the one that is not meant")
        return {}
    try:
        if index.exists():
            return _indexed(folder, _weight_map(index), problems)
        if single.exists():
            return dict(_header(single))
        problems.append(f"there is neither {SINGLE} nor {INDEX}")
    except (_DamagedError, OSError) as error:
        problems.append(str(error))
    return {}


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, from an index."""
    content = _json(index.read_bytes(), index.name)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise _DamagedError(f"{index.name} has no weight_map, which says what file a tensor is in")
    if wrong := sorted({_readable(file) for file in files.values() if not _is_file_name(file)}):
        raise _DamagedError(f"{index.name} names {_some(wrong)}, which are no files of this folder")
    return files


def _is_file_name(value: Any) -> bool:
    if not isinstance(value, str) or not _is_text(value) or "\0" in value:
        return False
    return value not in ("", "..") and Path(value).name == value


def _is_text(value: str) -> bool:
    """Tell whether there are such characters: JSON can write halves of them, which nothing can print."""
    with contextlib.suppress(UnicodeEncodeError):
        value.encode("utf-8")
        return True
    return False


def _readable(value: Any) -> str:
    return value if isinstance(value, str) and value and value.isprintable() else repr(value)


def _indexed(folder: Path, files: dict[str, str], problems: list[str]) -> dict[str, _Part]:
    """Return the tensors of the files that an index names, and compare their names with it."""
    expected: dict[str, list[str]] = {}
    for name, file in files.items():
        expected.setdefault(file, []).append(name)
    parts: dict[str, _Part] = {}
    for file, names in sorted(expected.items()):
        try:
            found = dict(_header(folder / file))
        except FileNotFoundError:
            problems.append(f"{file} is not there; {INDEX} says that it holds {_some(names)}")
            continue
        except (_DamagedError, OSError) as error:
            problems.append(str(error))
            continue
        if absent := [name for name in names if name not in found]:
            problems.append(f"{file} does not hold {_some(absent)}, as {INDEX} says")
        if unknown := [name for name in found if name not in files]:
            problems.append(f"{file} holds {_some(unknown)}, of which {INDEX} says nothing")
        if twice := [name for name in found if files.get(name, file) != file]:
            problems.append(f"{file} holds {_some(twice)}, for which {INDEX} names {files[twice[0]]}")
        parts.update((name, part) for name, part in found.items() if name not in twice)
    return parts


def _header(file: Path) -> Iterator[tuple[str, _Part]]:
    """Yield the tensors of a file whose header is right, and whose length is what the header says."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(LENGTH), "little")
        start = LENGTH + length
        if size < LENGTH or length > LARGEST_HEADER or size < start:
            raise _DamagedError(
                f"{file.name} has {size} bytes and ends within its header, or is no safetensors file"
            )
        content = _json(stream.read(length), file.name)
    if not isinstance(content, dict):
        raise _DamagedError(f"{file.name} has a header that is no JSON object")
    content.pop("__metadata__", None)
    parts = {name: _part(file, start, name, entry) for name, entry in content.items()}
    end, before = start, "the header"
    for name, part in sorted(parts.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if part.offset != end:
            what = "overlaps" if part.offset < end else "leaves a hole after"
            raise _DamagedError(f"{file.name}: {name} {what} {before}")
        end, before = end + part.nbytes, name
    if size != end:
        how = "is cut short" if size < end else "has bytes that no tensor owns"
        raise _DamagedError(f"{file.name} {how}: {size} bytes, of {end} that its header tells of")
    yield from parts.items()


def _part(file: Path, start: int, name: str, entry: Any) -> _Part:
    """Return what a header says of one tensor."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (_counts(shape) and _counts(offsets) and len(offsets) == 2 and isinstance(dtype, str)):
        raise _DamagedError(f"{file.name} has a header that gives {name} no dtype, shape and data_offsets")
    if dtype not in DTYPES:
        raise _DamagedError(f"{file.name}: {name} is of dtype {dtype}, which is none of {', '.join(DTYPES)}")
    part = _Part(file, start + offsets[0], DTYPES[dtype], tuple(shape))
    if offsets[1] - offsets[0] != part.nbytes:
        nbytes = offsets[1] - offsets[0]
        raise _DamagedError(
            f"{file.name}: {name} has {nbytes} bytes, and {dtype} {shape} takes {part.nbytes}"
        )
    return part


def _with_factors(
    parts: dict[str, _Part], block: tuple[int, int], problems: list[str]
) -> Iterator[tuple[str, _Part]]:
    """Yield all weights, those in FP8 with their factors, which are no weights of their own."""
    for name, part in parts.items():
        where = f"{part.file.name}: {name}"
        if name.endswith(FACTORS):
            weight = parts.get(name.removesuffix(FACTORS))
            if weight is None or weight.dtype != torch.float8_e4m3fn:
                problems.append(f"{where} has no weight in FP8 (F8_E4M3) to belong to")
        elif part.dtype != torch.float8_e4m3fn:
            yield name, part
        elif (factors := parts.get(name + FACTORS)) is None:
            problems.append(f"{where} is in FP8, and {name}{FACTORS} with its factors is not there")
        elif len(part.shape) not in (2, 3):
            problems.append(f"{where} is in FP8 and {list(part.shape)}, which is no matrix or stack of them")
        else:
            expected = fp8.factors_shape(part.shape, block)
            if factors.dtype not in FACTOR_DTYPES or factors.shape != expected:
                problems.append(
                    f"{factors.file.name}: {name}{FACTORS} is {list(factors.shape)} in {factors.dtype}; "
                    f"blocks of {block[0]} x {block[1]} need {list(expected)} in "
                    f"{' or '.join(map(str, FACTOR_DTYPES))}"
                )
            yield name, _Part(part.file, part.offset, part.dtype, part.shape, factors)


def _shape_of(
    name: str, part: _Part, begin: int, end: int | None, columns: tuple[int, int] | None
) -> tuple[int, ...]:
    """Return the shape of some rows and columns of a tensor; it has to have them."""
    asked = f"{name} is {list(part.shape)} and has no"
    if not part.shape:
        if begin or end is not None or columns is not None:
            raise ValueError(f"{asked} rows")
        return ()
    rows, *rest = part.shape
    end = rows if end is None else end
    if not 0 <= begin <= end <= rows:
        raise ValueError(f"{asked} rows {begin} to {end}")
    if columns is not None:
        if not (rest and 0 <= columns[0] <= columns[1] <= rest[0]):
            raise ValueError(f"{asked} columns {columns[0]} to {columns[1]}")
        rest[0] = columns[1] - columns[0]
    return (end - begin, *rest)


def _layers(described: Mapping[str, Any], name: str, problems: list[str]) -> int:
    """Return how many layers a configuration speaks of; one that is no number goes to ``problems``."""
    value = described.get(name)
    if value is None:
        return 0
    if type(value) is int and 0 <= value <= MOST_LAYERS:
        return value
    problems.append(f"config.json has a {name} of {value!r}, which is no number of layers")
    return 0


def _may_be(block: list[int]) -> bool:
    """Tell whether blocks have such sizes; larger ones than any weight would take memory for nothing."""
    return all(0 < each <= _LARGEST_BLOCK for each in block)


def _counts(value: Any) -> bool:
    """Tell whether a value out of JSON is a list of integers that count something."""
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _json(text: bytes, file: str) -> Any:
    """Return the content of JSON whose objects name nothing twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if odd := [repr(name) for name in content if not _is_text(name)]:
            raise _DamagedError(f"{file} names {_some(odd)}, which is no text")
        if len(content) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = [name for name, count in counts.items() if count > 1]
            raise _DamagedError(f"{file} names {_some(twice)} twice")
        return content

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _DamagedError(f"{file} holds, where JSON should be, something else ({error})") from error


def _some(names: list[str]) -> str:
    """Join names; of many, the first ones and their number."""
    rest = f" and {len(names) - _MENTIONED} more" if len(names) > _MENTIONED else ""
    return ", ".join(names[:_MENTIONED]) + rest


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU that has elements."""
    # One element counts as contiguous whatever its strides are, which a view as bytes refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _read_exactly(descriptor: int, out: Tensor, offset: int, file: Path) -> None:
    """Fill a contiguous tensor on the CPU with a file's bytes from ``offset`` on."""
    if out.numel() == 0:
        return
    left = bytes_of(out)
    while left:
        count = os.preadv(descriptor, [left], offset)
        if count == 0:
            raise _DamagedError(f"{file.name} ends at byte {offset}: it was cut after its header was read")
        left, offset = left[count:], offset + count
