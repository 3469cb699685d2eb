"""Recorded selections of a run: which keys each row of each layer attended to, one file for each rank.

A file ``rank00003.selections`` begins with eight bytes that name the format and a header in JSON, and goes on
with records, each of which has its length and a checksum before it:

* a record is of one sequence of one step, in one layer: the number of the step, from 1; of the sequence among
  those of the step's global batch, from 0; and of the layer, from 1, those of multi-token prediction behind
  the decoder's;
* its rows are runs of neighbours: the position at which their document begins, that of the first row, and how
  many there are. Positions of rows count from the first row of the sequence, or pack;
* their keys count from the begin of the document, see :mod:`.rows`; behind them lie the lower 16 bits of
  each row's token, where the rank knows them, by which other data are noticed; and maybe, for each key in
  ascending order, the share of the row's attention that it got, a mean over heads, as fp16.

A rank that is killed leaves half a record at the end at most, which readers pass over and the next writer
cuts off. A job that goes on cuts off what it does again, of all ranks that there were (:func:`cut_off`). Of
several files that say something of a row, and several records of one file, the last one counts.
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
"""Length of the rest, and its CRC-32."""
_RECORD = struct.Struct("<IIIII?")
"""Step, sequence, layer, number of runs, length of the keys' bytes, and whether tokens follow them."""
_TOKEN = 0xFFFF
"""Bits of a token that are kept: enough to notice other data."""


class Run(NamedTuple):
    """Neighbours among the rows of a sequence.

    Attributes:
        document: position at which their document begins.
        first: position of the first row, in the sequence.
        rows: number of rows.
    """

    document: int
    first: int
    rows: int


class Key(NamedTuple):
    """Place of a selection in a run.

    Attributes:
        step: from 1.
        sequence: of the step's global batch, from 0.
        layer: from 1; layers of multi-token prediction follow the decoder's.
    """

    step: int
    sequence: int
    layer: int


@dataclass(frozen=True)
class Header:
    """Model that a recording is of.

    Attributes:
        topk: keys of a row, at most.
        layers: of the decoder.
        mtp_layers: of multi-token prediction.
        computing: numbers of the layers that select keys, ascending, in the order in which arrays have them.
    """

    topk: int
    layers: int
    mtp_layers: int
    computing: tuple[int, ...]

    def problems(self, other: Header) -> Iterator[str]:
        """Yield in which ways a model, the other one, is not that of the recording."""
        for name in ("topk", "layers", "mtp_layers"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                yield f"{name} is {mine} in the recording and {theirs} in the model"
        if self.computing != other.computing:
            yield f"layers {list(self.computing)} select keys in it, and {list(other.computing)} in the model"

    def to_bytes(self) -> bytes:
        """Return the begin of a file."""
        text = json.dumps(asdict(self)).encode()
        return _MAGIC + _framed(text)


def positions_of(runs: Sequence[Run]) -> tuple[Ints, Ints]:
    """Return the position of each row in its sequence, and that at which its document begins."""
    documents, firsts, counts = np.array(runs, np.int32).reshape(-1, 3).T
    within = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    return (np.repeat(firsts, counts) + within).astype(np.int32), np.repeat(documents, counts)


# -- writing -------------------------------------------------------------------------------------


class Writer:
    """File of one rank's selections, to which records are appended.

    Args:
        folder: the recording's folder; made if need be.
        rank: of the process.
        header: of the model.

    Raises:
        OSError: the folder cannot be written.
        RunError: the rank's file there is of another model.
    """

    def __init__(self, folder: Path, rank: int, header: Header) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, begin = folder / f"{_PREFIX_OF_FILES}{rank:05d}{SUFFIX}", header.to_bytes()
        if self.path.exists():
            with self.path.open("rb") as file:
                found = file.read(len(begin))
            if not begin.startswith(found):
                raise RunError(
                    f"{self.path} is of another model, or no recording; record into a folder of its own"
                )
            # Half a record, or half a header: a process that was killed at once leaves that.
            os.truncate(self.path, _scan(self.path).end if found == begin else 0)
        # Unbuffered: what was written is there when the process is killed.
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
    ) -> int:
        """Append one record, and return its bytes.

        Args:
            key: its place.
            runs: its rows.
            keys: ``[rows, width]``, counted from the begin of the row's document, -1 where there is none;
                with a mass they are ascending, -1 at the tail.
            mass: ``[rows, width]``, each key's share of the row's attention.
            tokens: ``[rows]``, token of each row.

        Raises:
            WrongRows: a row lists what it does not see, or a key twice.
            OSError: the disk is full, or gone; the file ends with the record before.
        """
        positions, documents = positions_of(runs)
        blob = encode(keys, positions - documents + 1)
        shares = b"" if mass is None else mass[keys >= 0].astype("<f2").tobytes()
        flat = np.array(runs, "<u4").tobytes()
        words = b"" if tokens is None else (tokens & _TOKEN).astype("<u2").tobytes()
        begin = _RECORD.pack(*key, len(runs), len(blob), tokens is not None)
        return self._write(_framed(begin + flat + blob + words + shares))

    def _write(self, data: bytes) -> int:
        before, view = self._file.tell(), memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) or 0 :]
        except OSError:
            self._file.truncate(before)
            raise
        return len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def cut_off(folder: Path, rank: int, ranks: int, first_step: int) -> None:
    """Cut off what an earlier job recorded from a step on, which this one does again in whatever layout.

    Every rank calls it before it writes. It cuts its own file and, of an earlier job with more ranks, those
    whose numbers are a multiple of the number of ranks above its own.

    Args:
        folder: of the recording; need not be there.
        rank: of the process.
        ranks: number of processes.
        first_step: of the job.

    Raises:
        OSError: a file cannot be written.
    """
    for path in folder.glob(f"*{SUFFIX}"):
        of_file = _rank_of(path)
        if of_file is not None and of_file % ranks == rank and header_of_file(path) is not None:
            entries, end = _scan(path)
            again = (entry.offset for entry in entries if entry.key.step >= first_step)
            os.truncate(path, next(again, end))


def free_rank(folder: Path) -> int:
    """Return the least number above those of all ranks that have a file."""
    ranks = (_rank_of(path) for path in folder.glob(f"*{SUFFIX}"))
    return max((rank for rank in ranks if rank is not None), default=-1) + 1


def _rank_of(path: Path) -> int | None:
    return number(path.name.removesuffix(SUFFIX).removeprefix(_PREFIX_OF_FILES))


def _framed(body: bytes) -> bytes:
    return _PREFIX.pack(len(body), zlib.crc32(body)) + body


def _unframed(data: bytes) -> bytes:
    """Return what :func:`_framed` was given; raises ValueError for other bytes."""
    length, checksum = _PREFIX.unpack_from(data)
    body = data[_PREFIX.size :]
    if len(body) != length or zlib.crc32(body) != checksum:
        raise ValueError("its checksum is another one")
    return body


# -- reading -------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """Record of a file: its place in the run and in the file."""

    key: Key
    runs: tuple[Run, ...]
    offset: int
    end: int


class _Scanned(NamedTuple):
    """Whole records of a file, and where they end."""

    entries: list[_Entry]
    end: int


def _scan(path: Path) -> _Scanned:
    """Read which records a file has behind its header."""
    entries = []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(len(_MAGIC))
        at = len(_MAGIC) + _PREFIX.size + _PREFIX.unpack(file.read(_PREFIX.size))[0]
        while at + _PREFIX.size + _RECORD.size <= size:
            file.seek(at)
            length, _ = _PREFIX.unpack(file.read(_PREFIX.size))
            end = at + _PREFIX.size + length
            step, sequence, layer, runs, *_ = _RECORD.unpack(file.read(_RECORD.size))
            if end > size or _RECORD.size + 12 * runs > length:
                break
            flat = np.frombuffer(file.read(12 * runs), "<u4").reshape(-1, 3).tolist()
            entries.append(_Entry(Key(step, sequence, layer), tuple(Run(*each) for each in flat), at, end))
            at = end
    return _Scanned(entries, at)


@dataclass(frozen=True)
class Rows:
    """Recorded rows of one sequence in one layer.

    Attributes:
        positions: ``[rows]``, of each row in the sequence.
        documents: ``[rows]``, where the row's document begins.
        keys: ``[rows, topk]`` int32, counted from there, ascending, -1 at the tail.
        mass: ``[rows, topk]`` fp32, each key's share of the row's attention; None if it was not recorded.
        tokens: ``[rows]``, the lower 16 bits of each row's token; None if the rank did not know them.
    """

    positions: Ints
    documents: Ints
    keys: Ints
    mass: npt.NDArray[np.float32] | None = None
    tokens: npt.NDArray[np.uint16] | None = None


@dataclass
class Recording:
    """A folder of recorded selections.

    Attributes:
        folder: path of it.
        header: of the model.
        problems: sentences, one for each file or part of one that could not be read.
    """

    folder: Path
    header: Header
    problems: list[str] = field(default_factory=list)
    _index: dict[Key, list[tuple[Path, _Entry]]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Recording:
        """Read which records there are.

        Raises:
            RunError: there is no recording, or those of several models.
        """
        files = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
        if not files:
            raise RunError(
                f"{folder} holds no recorded selections; name the folder that was given to "
                "--dsa-record-selections"
            )
        found: Recording | None = None
        problems = []
        for path in files:
            header = header_of_file(path)
            if header is None:
                problems.append(f"{path.name} has no header of a recording")
                continue
            found = found or cls(folder, header)
            differences = list(found.header.problems(header))
            if differences:
                raise RunError(
                    f"{folder} holds selections of several models: in {path.name} {'; '.join(differences)}; "
                    "record each run into a folder of its own"
                )
            entries, end = _scan(path)
            for entry in entries:
                found._index.setdefault(entry.key, []).append((path, entry))
            if path.stat().st_size != end:
                problems.append(f"{path.name} ends with half a record, which is passed over")
        if found is None:
            raise RunError(f"{folder} holds no recording that can be read: {'; '.join(problems)}")
        found.problems = problems
        return found

    def places(self) -> list[Key]:
        """Return the places of all records, in order."""
        return sorted(self._index)

    def count(self, key: Key) -> int:
        """Return how many rows were recorded at a place, those recorded twice counted twice."""
        return sum(run.rows for _, entry in self._index.get(key, ()) for run in entry.runs)

    def rows(self, key: Key) -> Rows | None:
        """Return what was recorded at a place; None if nothing was.

        Raises:
            RunError: a record is damaged.
        """
        parts = [self._read(path, entry) for path, entry in self._index.get(key, ())]
        if len(parts) < 2:
            return parts[0] if parts else None
        positions = np.concatenate([part.positions for part in parts])
        # The last one that says something of a row counts.
        _, last = np.unique(positions[::-1], return_index=True)
        chosen = len(positions) - 1 - last

        def joined(name: str) -> Any:
            arrays = [getattr(part, name) for part in parts]
            return None if any(each is None for each in arrays) else np.concatenate(arrays)[chosen]

        return Rows(positions[chosen], *map(joined, ("documents", "keys", "mass", "tokens")))

    def _read(self, path: Path, entry: _Entry) -> Rows:
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                body = _unframed(file.read(entry.end - entry.offset))
            # The record's checksum holds for its runs, whose counts decide how much memory is asked for.
            positions, documents = positions_of(entry.runs)
            *_, size, has_tokens = _RECORD.unpack_from(body)
            at = _RECORD.size + 12 * len(entry.runs)
            keys = decode(body[at : at + size], positions - documents + 1, self.header.topk)
            at += size
            tokens = np.frombuffer(body[at : at + 2 * len(keys)], "<u2") if has_tokens else None
            shares = np.frombuffer(body[at + 2 * len(keys) * has_tokens :], "<f2")
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
        """Return the selections of one sequence as engines hand them over.

        Returns:
            ``[tokens, computing layers, topk]`` int32, counted from the begin of the token's document,
            ascending, -1 at the tail and in rows that were not recorded. Tokens go up to the last one that
            was.

        Raises:
            RunError: nothing was recorded there, or a record is damaged.
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
    """Return the model that a folder has selections of; None if it has none that can be read."""
    headers = map(header_of_file, sorted(folder.glob(f"*{SUFFIX}")))
    return next((header for header in headers if header is not None), None)


def header_of_file(path: Path) -> Header | None:
    """Return the header of a file; None if it has none that can be read."""
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
