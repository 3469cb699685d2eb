"""Recorded selections of a run: which keys each row of each layer attended to, one file for each rank.

A file ``rank00003.selections`` begins with eight bytes that name the format and a header in JSON, and goes on
with records, each of which has its length and a checksum before it:

* a record is of one sequence of one step, in one layer: the number of the step, from 1; of the sequence among
  those of the step's global batch, from 0; and of the layer, from 1, those of multi-token prediction behind
  the decoder's;
* its rows are runs of neighbours: the position at which their document begins, that of the first row, and how
  many there are. Positions of rows count from the first row of the sequence, or pack;
* their keys count from the begin of the document, see :mod:`.selection_rows`; behind them lie the lower 16
  bits of each row's token, where the rank knows them, by which other data are noticed; and maybe, for each
  key in ascending order, the share of the row's attention that it got, a mean over heads, as fp16.

A rank that is killed leaves half a record at the end at most, which readers pass over and the next writer
cuts off. A job that goes on cuts off what it does again, of all ranks that there were (:func:`cut_off`). Of
several files that say something of a row, and several records of one file, the last one counts.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mindspeed_dsa.runs.files import RunError, number
from mindspeed_dsa.runs.selection_rows import Ints, WrongRows, decode, encode

SUFFIX = ".selections"
_PREFIX_OF_FILES = "rank"
_MAGIC = b"DSASEL2\n"
_PREFIX = struct.Struct("<II")
"""Length of what follows, and its CRC-32."""
_RECORD = struct.Struct("<IIIII?")
"""Step, sequence, layer, number of runs, length of the keys' bytes, and whether tokens follow them."""
_TOKEN = 0xFFFF
"""Bits of a token that are kept: enough to notice other data."""


class Run(NamedTuple):
    """Neighbours among the rows of a sequence.

    Attributes:
        document: position at which their document begins.
        first: position of the first row, in the sequence.
        rows: how many there are.
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
        text = json.dumps(
            {
                "topk": self.topk,
                "layers": self.layers,
                "mtp_layers": self.mtp_layers,
                "computing": list(self.computing),
            }
        ).encode()
        return _MAGIC + _PREFIX.pack(len(text), zlib.crc32(text)) + text


def visible_of(runs: Sequence[Run]) -> Ints:
    """Return how many keys each row sees: those of its document up to itself."""
    parts = [np.arange(run.rows, dtype=np.int32) + (run.first - run.document + 1) for run in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def positions_of(runs: Sequence[Run]) -> Ints:
    """Return the position of each row in its sequence."""
    parts = [np.arange(run.first, run.first + run.rows, dtype=np.int32) for run in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


# -- writing -------------------------------------------------------------------------------------


class Writer:
    """File of one rank's selections, to which records are appended.

    Args:
        folder: of the recording; made if need be.
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
            self._go_on(begin)
        # Unbuffered: what was written is there when the process is killed.
        self._file = self.path.open("ab", buffering=0)
        if self._file.tell() == 0:
            self._write(begin)

    def _go_on(self, begin: bytes) -> None:
        """Cut off half a record, or half a header: a process that was killed at once leaves that."""
        with self.path.open("r+b") as file:
            found = file.read(len(begin))
            if not begin.startswith(found):
                raise RunError(
                    f"{self.path} is of another model, or no recording; record into a folder of its own"
                )
            file.truncate(_end(file) if found == begin else 0)

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
        blob = encode(keys, visible_of(runs))
        shares = b"" if mass is None else mass[keys >= 0].astype("<f2").tobytes()
        flat = np.array(runs, "<u4").tobytes()
        words = b"" if tokens is None else (tokens & _TOKEN).astype("<u2").tobytes()
        begin = _RECORD.pack(*key, len(runs), len(blob), tokens is not None)
        body = b"".join((begin, flat, blob, words, shares))
        return self._write(_PREFIX.pack(len(body), zlib.crc32(body)) + body)

    def _write(self, data: bytes) -> int:
        before = self._file.tell()
        view = memoryview(data)
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
        ranks: how many there are.
        first_step: of the job.

    Raises:
        OSError: a file cannot be written.
    """
    for path in folder.glob(f"*{SUFFIX}"):
        of_file = _rank_of(path)
        if of_file is not None and of_file % ranks == rank and _header(path) is not None:
            with path.open("r+b") as file:
                file.truncate(_end(file, first_step))


def free_rank(folder: Path) -> int:
    """Return the least number above those of all ranks that have a file."""
    ranks = (_rank_of(path) for path in folder.glob(f"*{SUFFIX}"))
    return max((rank for rank in ranks if rank is not None), default=-1) + 1


def _rank_of(path: Path) -> int | None:
    """Return the rank whose file it is."""
    return number(path.name.removesuffix(SUFFIX).removeprefix(_PREFIX_OF_FILES))


# -- reading -------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """Record of a file: its place in the run and in the file."""

    key: Key
    runs: tuple[Run, ...]
    offset: int
    end: int


def _entries(file: Any) -> Iterator[_Entry]:
    """Yield the whole records of a file that is read up to the end of its header."""
    size = file.seek(0, 2)
    file.seek(len(_MAGIC))
    length, _ = _PREFIX.unpack(file.read(_PREFIX.size))
    at = len(_MAGIC) + _PREFIX.size + length
    while at + _PREFIX.size + _RECORD.size <= size:
        file.seek(at)
        length, _ = _PREFIX.unpack(file.read(_PREFIX.size))
        end = at + _PREFIX.size + length
        step, sequence, layer, runs, *_ = _RECORD.unpack(file.read(_RECORD.size))
        if end > size or _RECORD.size + 12 * runs > length:
            return
        flat = np.frombuffer(file.read(12 * runs), "<u4").reshape(-1, 3).tolist()
        yield _Entry(Key(step, sequence, layer), tuple(Run(*each) for each in flat), at, end)
        at = end


def _end(file: Any, first_step: int | None = None) -> int:
    """Return where the whole records end, or those of steps before one."""
    end = len(_MAGIC) + _PREFIX.size
    file.seek(len(_MAGIC))
    end += _PREFIX.unpack(file.read(_PREFIX.size))[0]
    for entry in _entries(file):
        if first_step is not None and entry.key.step >= first_step:
            break
        end = entry.end
    return end


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
        folder: that was read.
        header: of the model.
        problems: what of the folder could not be read, a sentence each.
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
            header = _header(path)
            if header is None:
                problems.append(f"{path.name} has no header of a recording")
                continue
            if found is None:
                found = cls(folder, header)
            differences = list(found.header.problems(header))
            if differences:
                raise RunError(
                    f"{folder} holds selections of several models: in {path.name} {'; '.join(differences)}; "
                    "record each run into a folder of its own"
                )
            with path.open("rb") as file:
                end = 0
                for entry in _entries(file):
                    found._index.setdefault(entry.key, []).append((path, entry))
                    end = entry.end
                if end and file.seek(0, 2) != end:
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
        entries = self._index.get(key)
        if not entries:
            return None
        parts = [self._read(path, entry) for path, entry in entries]
        if len(parts) == 1:
            return parts[0]
        positions = np.concatenate([part.positions for part in parts])
        # The last one that says something of a row counts.
        _, last = np.unique(positions[::-1], return_index=True)
        chosen = len(positions) - 1 - last
        return Rows(
            positions[chosen],
            np.concatenate([part.documents for part in parts])[chosen],
            np.concatenate([part.keys for part in parts])[chosen],
            _joined([part.mass for part in parts], chosen),
            _joined([part.tokens for part in parts], chosen),
        )

    def _read(self, path: Path, entry: _Entry) -> Rows:
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                data = file.read(entry.end - entry.offset)
            length, checksum = _PREFIX.unpack(data[: _PREFIX.size])
            body = data[_PREFIX.size :]
            if len(body) != length or zlib.crc32(body) != checksum:
                raise WrongRows("its checksum is another one")
            *_, size, has_tokens = _RECORD.unpack(body[: _RECORD.size])
            at = _RECORD.size + 12 * len(entry.runs)
            keys = decode(body[at : at + size], visible_of(entry.runs), self.header.topk)
            tokens, at = None, at + size
            if has_tokens:
                tokens = np.frombuffer(body[at : at + 2 * len(keys)], "<u2")
                at += 2 * len(keys)
            shares = np.frombuffer(body[at:], "<f2")
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
        documents = np.repeat(
            np.array([run.document for run in entry.runs], np.int32), [run.rows for run in entry.runs]
        )
        return Rows(positions_of(entry.runs), documents, keys, mass, tokens)

    def array(self, step: int, sequence: int) -> Ints:
        """Return the selections of one sequence as engines hand them over.

        Returns:
            ``[tokens, computing layers, topk]`` int32, counted from the begin of the token's document,
            ascending, -1 at the tail and in rows that were not recorded. Tokens go up to the last one that
            was.

        Raises:
            RunError: nothing was recorded there, or a record is damaged.
        """
        found = {
            column: rows
            for column, layer in enumerate(self.header.computing)
            if (rows := self.rows(Key(step, sequence, layer))) is not None
        }
        if not found:
            raise RunError(f"{self.folder} has no selection of step {step}, sequence {sequence}")
        tokens = max(int(rows.positions.max(initial=-1)) for rows in found.values()) + 1
        out = np.full((tokens, len(self.header.computing), self.header.topk), -1, np.int32)
        for column, rows in found.items():
            out[rows.positions, column] = rows.keys
        return out


def _joined(parts: Sequence[npt.NDArray[Any] | None], chosen: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known)[chosen] if len(known) == len(parts) else None


def header_in(folder: Path) -> Header | None:
    """Return the model that a folder has selections of; None if it has none that can be read."""
    headers = (_header(path) for path in sorted(folder.glob(f"*{SUFFIX}")))
    return next((header for header in headers if header is not None), None)


def _header(path: Path) -> Header | None:
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            length, checksum = _PREFIX.unpack(file.read(_PREFIX.size))
            text = file.read(length)
        if len(text) != length or zlib.crc32(text) != checksum:
            return None
        values: Mapping[str, Any] = json.loads(text)
        return Header(values["topk"], values["layers"], values["mtp_layers"], tuple(values["computing"]))
    except (OSError, ValueError, KeyError, struct.error):
        return None
