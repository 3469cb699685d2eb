"""File format of recorded selections: the keys selected for each query token and layer, one file per rank.

A file, such as ``rank00003.selections``, starts with eight magic bytes and a JSON header. Records follow,
each preceded by its length and a checksum.

* A record belongs to one sequence of one step, in one layer. The step counts from 1, the sequence from 0 in
  the step's global batch, the layer from 1 with multi-token prediction layers after the decoder's.
* The record's query tokens (rows) are listed as runs of contiguous positions: start of the document, position
  of the first token, number of tokens. Positions count from the first token of the sequence or pack.
* Key positions are relative to the document's start; see :mod:`.rows`. The lower 16 bits of each token id
  follow if the rank knows them, to detect replay with other data. Attention probabilities of the keys,
  averaged over heads, can follow as fp16, in the order of ascending keys.

A killed rank leaves at most one incomplete record at the end, which readers skip and the next writer
truncates. A resumed job truncates the records that it will write again, in the files of all ranks of the
earlier job (:func:`cut_off`). If several records contain the same query token, the last one counts.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mindspeed_dsa.features.dsa.selections.rows import Ints, decode, encode
from mindspeed_dsa.runs.files import RunError, number

SUFFIX = ".selections"
_PREFIX_OF_FILES = "rank"
_MAGIC = b"DSASEL2\n"
_PREFIX = struct.Struct("<II")
"""Length of a record's content, and its CRC-32."""
_RECORD = struct.Struct("<IIIII?")
"""Step, sequence, layer, number of runs, length of the keys' bytes, and whether tokens follow them."""
_TOKEN = 0xFFFF
"""Mask of the token bits that are kept: enough to detect other data."""


class Run(NamedTuple):
    """Contiguous query tokens of a sequence.

    Attributes:
        document: position of the first token of the document.
        first: position of the run's first token, in the sequence.
        rows: number of tokens.
    """

    document: int
    first: int
    rows: int


class Key(NamedTuple):
    """Identifier of a record: step, sequence and layer.

    Attributes:
        step: number of the step, from 1.
        sequence: index in the step's global batch, from 0.
        layer: number of the layer, from 1; multi-token prediction layers are numbered after the decoder
            layers.
    """

    step: int
    sequence: int
    layer: int


@dataclass(frozen=True)
class Header:
    """Model sizes that a recording belongs to.

    Attributes:
        topk: largest number of keys per query token.
        layers: number of decoder layers.
        mtp_layers: number of multi-token prediction layers.
        computing: numbers of the layers that select keys, ascending. Arrays have the layers in this order.
    """

    topk: int
    layers: int
    mtp_layers: int
    computing: tuple[int, ...]

    def problems(
        self, other: Header, here: object = "the recording", there: object = "the model"
    ) -> Iterator[str]:
        """Yield differences from another header; messages call this one ``here`` and the other ``there``."""
        for name in ("topk", "layers", "mtp_layers"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                yield f"{name} is {mine} in {here} and {theirs} in {there}"
        if self.computing != other.computing:
            mine, theirs = list(self.computing), list(other.computing)
            yield f"layers {mine} select keys in {here}, and {theirs} in {there}"

    def to_bytes(self) -> bytes:
        """Encode the start of a file: magic bytes and header."""
        text = json.dumps(asdict(self)).encode()
        return _MAGIC + _framed(text)


def positions_of(runs: Sequence[Run]) -> tuple[Ints, Ints]:
    """Return each token's position in the sequence, and the start of its document, ``[rows]`` int32 each."""
    documents, firsts, counts = np.array(runs, np.int32).reshape(-1, 3).T
    # Offset of each row within its run: counts 2, 3 -> 0 1 0 1 2.
    within = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    return (np.repeat(firsts, counts) + within).astype(np.int32), np.repeat(documents, counts)


# -- writing -------------------------------------------------------------------------------------


class Writer:
    """Writer of one rank's file; it appends records.

    Args:
        folder: folder of the recording, created if missing.
        rank: rank of the process.
        header: header of the model.

    Raises:
        OSError: the folder cannot be written.
        RunError: the existing file of the rank belongs to another model.
    """

    def __init__(self, folder: Path, rank: int, header: Header) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, begin = folder / f"{_PREFIX_OF_FILES}{rank:05d}{SUFFIX}", header.to_bytes()
        if self.path.exists():
            with self.path.open("rb") as file:
                existing = file.read(len(begin))
            if not begin.startswith(existing):
                raise RunError(
                    f"{self.path} is of another model, or no recording; record into a folder of its own"
                )
            # A process killed while writing leaves half a record or half a header.
            os.truncate(self.path, _scan(self.path).end if existing == begin else 0)
        # Unbuffered, so that nothing written is lost if the process is killed.
        self._file = self.path.open("ab", buffering=0)
        if self._file.tell() == 0:
            self._write(begin)

    def append(
        self,
        key: Key,
        runs: Sequence[Run],
        keys: npt.NDArray[Any],
        mass: npt.NDArray[Any] | None = None,
        tokens: npt.NDArray[Any] | None = None,
    ) -> None:
        """Append one record.

        Args:
            key: key of the record.
            runs: runs of the record's query tokens.
            keys: selected keys ``[rows, width]``, relative to the document's start, -1 for no key. If
                ``mass`` is given, they must be ascending with -1 at the tail.
            mass: attention probability of each key, ``[rows, width]``.
            tokens: token id of each query token, ``[rows]``.

        Raises:
            WrongRows: a query token has a key that it cannot see, or has a key twice.
            OSError: writing fails. The file then ends with the previous record.
        """
        positions, documents = positions_of(runs)
        blob = encode(keys, positions - documents + 1)
        shares = b"" if mass is None else mass[keys >= 0].astype("<f2").tobytes()
        flat = np.array(runs, "<u4").tobytes()
        words = b"" if tokens is None else (tokens & _TOKEN).astype("<u2").tobytes()
        begin = _RECORD.pack(*key, len(runs), len(blob), tokens is not None)
        self._write(_framed(begin + flat + blob + words + shares))

    def _write(self, data: bytes) -> None:
        before, view = self._file.tell(), memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) or 0 :]
        except OSError:
            self._file.truncate(before)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def cut_off(folder: Path, rank: int, ranks: int, first_step: int) -> None:
    """Truncate records of an earlier job from ``first_step`` on, because this job will write them again.

    Every rank calls this before it writes, and truncates its own file. If the earlier job had more ranks,
    their files are distributed: rank ``r`` also truncates the files of ranks ``r + ranks``, ``r + 2 * ranks``
    and so on.

    Args:
        folder: folder of the recording, which may be missing.
        rank: rank of the process.
        ranks: number of processes.
        first_step: first step of the job.

    Raises:
        OSError: a file cannot be written.
    """
    for path in folder.glob(f"*{SUFFIX}"):
        of_file = _rank_of(path)
        if of_file is not None and of_file % ranks == rank and header_of_file(path) is not None:
            entries, end = _scan(path)
            # Records are in the order of steps: everything from the first repeated step on goes.
            again = (entry.offset for entry in entries if entry.key.step >= first_step)
            os.truncate(path, next(again, end))


def free_rank(folder: Path) -> int:
    """Return the smallest number above all ranks that have a file."""
    ranks = (_rank_of(path) for path in folder.glob(f"*{SUFFIX}"))
    return max((rank for rank in ranks if rank is not None), default=-1) + 1


def _rank_of(path: Path) -> int | None:
    return number(path.name.removesuffix(SUFFIX).removeprefix(_PREFIX_OF_FILES))


def _framed(body: bytes) -> bytes:
    return _PREFIX.pack(len(body), zlib.crc32(body)) + body


def _unframed(data: bytes) -> bytes:
    """Return the content of a frame made by :func:`_framed`. Raises ValueError for invalid bytes."""
    length, checksum = _PREFIX.unpack_from(data)
    body = data[_PREFIX.size :]
    if len(body) != length or zlib.crc32(body) != checksum:
        raise ValueError("its checksum is another one")
    return body


# -- reading -------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """Record in a file: its key and its byte range."""

    key: Key
    runs: tuple[Run, ...]
    offset: int
    end: int


class _Scanned(NamedTuple):
    """Complete records of a file, and the offset of their end."""

    entries: list[_Entry]
    end: int


def _scan(path: Path) -> _Scanned:
    """List the complete records of a file without reading their contents."""
    entries = []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(len(_MAGIC))
        offset = len(_MAGIC) + _PREFIX.size + _PREFIX.unpack(file.read(_PREFIX.size))[0]
        while offset + _PREFIX.size + _RECORD.size <= size:
            file.seek(offset)
            length, _ = _PREFIX.unpack(file.read(_PREFIX.size))
            end = offset + _PREFIX.size + length
            step, sequence, layer, runs, *_ = _RECORD.unpack(file.read(_RECORD.size))
            # A killed process leaves half a record at the end. 12 bytes per run: three uint32.
            if end > size or _RECORD.size + 12 * runs > length:
                break
            flat = np.frombuffer(file.read(12 * runs), "<u4").reshape(-1, 3).tolist()
            entries.append(_Entry(Key(step, sequence, layer), tuple(Run(*run) for run in flat), offset, end))
            offset = end
    return _Scanned(entries, offset)


@dataclass(frozen=True)
class Rows:
    """Recorded query tokens of one sequence in one layer.

    Attributes:
        positions: position of each query token in the sequence, ``[rows]``.
        documents: start of each query token's document, ``[rows]``.
        keys: selected keys ``[rows, topk]`` int32, relative to the document's start, ascending, -1 at the
            tail.
        mass: attention probability of each key ``[rows, topk]`` fp32; None if not recorded.
        tokens: lower 16 bits of each token id, ``[rows]``; None if the rank did not know them.
    """

    positions: Ints
    documents: Ints
    keys: Ints
    mass: npt.NDArray[np.float32] | None = None
    tokens: npt.NDArray[np.uint16] | None = None


@dataclass
class Recording:
    """Recorded selections in a folder.

    Attributes:
        folder: path of the folder.
        header: header of the model.
        problems: messages about files, or parts of files, that could not be read.
    """

    folder: Path
    header: Header
    problems: list[str] = field(default_factory=list)
    _index: dict[Key, list[tuple[Path, _Entry]]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Recording:
        """Open the recording in a folder, and index its records.

        Raises:
            RunError: the folder has no recording, or files of several models.
        """
        files = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
        if not files:
            raise RunError(
                f"{folder} holds no recorded selections; name the folder that was given to "
                "--dsa-record-selections"
            )
        recording: Recording | None = None
        problems = []
        for path in files:
            header = header_of_file(path)
            if header is None:
                problems.append(f"{path.name} has no header of a recording")
                continue
            recording = recording or cls(folder, header)
            differences = list(recording.header.problems(header, files[0].name, path.name))
            if differences:
                raise RunError(
                    f"{folder} holds selections of several models: {'; '.join(differences)}; "
                    "record each run into a folder of its own"
                )
            entries, end = _scan(path)
            for entry in entries:
                recording._index.setdefault(entry.key, []).append((path, entry))
            if path.stat().st_size != end:
                problems.append(f"{path.name} ends with half a record, which is passed over")
        if recording is None:
            raise RunError(f"{folder} holds no recording that can be read: {'; '.join(problems)}")
        recording.problems = problems
        return recording

    def places(self) -> list[Key]:
        """Return the keys of all records, sorted."""
        return sorted(self._index)

    def count(self, key: Key) -> int:
        """Return the number of query tokens recorded under a key. Tokens recorded twice count twice."""
        return sum(run.rows for _, entry in self._index.get(key, ()) for run in entry.runs)

    def rows(self, key: Key) -> Rows | None:
        """Return the query tokens recorded under a key, or None.

        Raises:
            RunError: a record is damaged.
        """
        parts = [self._read(path, entry) for path, entry in self._index.get(key, ())]
        if len(parts) < 2:
            return parts[0] if parts else None
        positions = np.concatenate([part.positions for part in parts])
        # np.unique returns first occurrences: reversed, the last record of each row.
        _, last = np.unique(positions[::-1], return_index=True)
        kept = len(positions) - 1 - last

        def joined(name: str) -> Any:
            arrays = [getattr(part, name) for part in parts]
            return None if any(array is None for array in arrays) else np.concatenate(arrays)[kept]

        return Rows(positions[kept], *map(joined, ("documents", "keys", "mass", "tokens")))

    def _read(self, path: Path, entry: _Entry) -> Rows:
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                body = _unframed(file.read(entry.end - entry.offset))
            # The checksum also covers the runs, whose counts determine the size of arrays below.
            positions, documents = positions_of(entry.runs)
            *_, size, has_tokens = _RECORD.unpack_from(body)
            offset = _RECORD.size + 12 * len(entry.runs)
            keys = decode(body[offset : offset + size], positions - documents + 1, self.header.topk)
            offset += size
            tokens = np.frombuffer(body[offset : offset + 2 * len(keys)], "<u2") if has_tokens else None
            shares = np.frombuffer(body[offset + 2 * len(keys) * has_tokens :], "<f2")
            mass = None
            if len(shares):
                mass = np.zeros(keys.shape, np.float32)
                mass[keys >= 0] = shares
        except (OSError, ValueError, struct.error) as error:
            step, sequence, layer = entry.key
            raise RunError(
                f"{path}: the selection of step {step}, sequence {sequence}, layer {layer} is damaged "
                f"({error})"
            ) from error
        return Rows(positions, documents, keys, mass, tokens)

    def array(self, step: int, sequence: int) -> Ints:
        """Return the selections of one sequence, in the array format of inference engines.

        Returns:
            Selected keys ``[tokens, computing layers, topk]`` int32, relative to the token's document,
            ascending, -1 at the tail. Tokens without a record have only -1. The last token is the last
            recorded one.

        Raises:
            RunError: the sequence has no record, or a record is damaged.
        """
        layers = [self.rows(Key(step, sequence, layer)) for layer in self.header.computing]
        tokens = max(
            (rows.positions.max(initial=-1) + 1 for rows in layers if rows is not None), default=None
        )
        if tokens is None:
            raise RunError(f"{self.folder} has no selection of step {step}, sequence {sequence}")
        out = np.full((tokens, len(layers), self.header.topk), -1, np.int32)
        for column, rows in enumerate(layers):
            if rows is not None:
                out[rows.positions, column] = rows.keys
        return out


def header_in(folder: Path) -> Header | None:
    """Return the header of the recording in a folder; None if no file is readable."""
    headers = map(header_of_file, sorted(folder.glob(f"*{SUFFIX}")))
    return next((header for header in headers if header is not None), None)


def header_of_file(path: Path) -> Header | None:
    """Return the header of a file; None if it is not readable."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            prefix = file.read(_PREFIX.size)
            text = _unframed(prefix + file.read(_PREFIX.unpack(prefix)[0]))
        values: Mapping[str, Any] = json.loads(text)
        return Header(values["topk"], values["layers"], values["mtp_layers"], tuple(values["computing"]))
    except (OSError, ValueError, KeyError, struct.error):
        return None
