"""Selected keys of rows as bytes: each row in the shorter of two forms, or in none where it lists every key.

A row's keys are positions ``0 <= k < visible`` of which none comes twice. The forms are

* *complete*: the row lists all keys that it sees, and takes no byte;
* *bitmap*: one bit for each visible key, the lowest position in the lowest bit of the first byte;
* *gaps*: for each key, ascending, how many positions lie between it and the key before it (the first one
  counts from position 0), in one byte; 255 says that 255 positions are passed over and the gap goes on.

With ``k`` keys a bitmap takes ``visible / 8`` bytes and gaps at most ``k + visible / 255``, where four bytes
for each position would be ``4 k``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

_COMPLETE, _BITMAP, _GAPS = 0, 1, 2
_ESCAPE = 255
# Rows of one step of the work: what lies between its arrays stays in cache, however many rows there are.
_ROWS = 256


class WrongRows(ValueError):
    """Rows that no selection has, or bytes that are no rows.

    Attributes:
        row: the first one, from 0; -1 where it is not known.
    """

    def __init__(self, problem: str, row: int = -1) -> None:
        super().__init__(problem)
        self.row = row


def integers(positions: npt.NDArray[Any]) -> Ints | Longs:
    """Return positions of any integer type as int32 or int64, of which none becomes another one's key.

    Indices are narrowed once :func:`check` has taken them: 2 ** 32 + 1 is no key 1.
    """
    if positions.dtype == np.uint64:
        positions = np.minimum(positions, np.uint64(np.iinfo(np.int64).max))
    return positions if positions.dtype == np.int32 else positions.astype(np.int64, copy=False)


def encode(positions: Ints | Longs, visible: Ints) -> bytes:
    """Return rows as bytes.

    Args:
        positions: ``[rows, width]``, in any order, negative where there is no key.
        visible: ``[rows]``, how many keys each row sees.

    Raises:
        WrongRows: a position is not visible, or comes twice.
    """
    blocks = []
    for first in range(0, len(positions), _ROWS):
        at = slice(first, first + _ROWS)
        try:
            block = _encoded(positions[at], visible[at].astype(np.int64))
        except WrongRows as error:
            raise WrongRows(str(error), first + error.row) from None
        blocks += [len(block).to_bytes(4, "little"), block]
    return b"".join(blocks)


def check(positions: Ints | Longs, visible: Ints) -> None:
    """Raise for what :func:`encode` raises for."""
    for first in range(0, len(positions), _ROWS):
        at = slice(first, first + _ROWS)
        try:
            _bits(positions[at], visible[at].astype(np.int64))
        except WrongRows as error:
            raise WrongRows(str(error), first + error.row) from None


def _bits(positions: Ints | Longs, visible: Longs) -> tuple[npt.NDArray[np.uint8], Longs, Longs]:
    """Return a byte for each visible key of every row, where rows begin, and how many keys they list.

    A row begins at a multiple of 8.
    """
    named = positions >= 0
    counts = np.count_nonzero(named, axis=1)
    begins = np.zeros(len(positions) + 1, np.int64)
    np.cumsum((visible + 7) // 8 * 8, out=begins[1:])
    beyond = (positions >= visible[:, None]).any(axis=1)
    if beyond.any():
        row = int(beyond.argmax())
        raise WrongRows(f"lists key {positions[row].max()} and sees {visible[row]} keys", row)
    bits = np.zeros(begins[-1], np.uint8)
    places = positions + begins[:-1, None]
    bits[places.ravel() if counts.sum() == named.size else places[named]] = 1
    if np.count_nonzero(bits) != counts.sum():
        for row, keys in enumerate(positions):
            distinct, times = np.unique(keys[keys >= 0], return_counts=True)
            if (times > 1).any():
                raise WrongRows(f"lists key {distinct[times > 1][0]} more than once", row)
    return bits, begins, counts


def _encoded(positions: Ints | Longs, visible: Longs) -> bytes:
    bits, begins, counts = _bits(positions, visible)
    width = np.diff(begins) // 8
    methods = np.where(counts == visible, _COMPLETE, np.where(width <= counts, _BITMAP, _GAPS))
    bitmaps = np.packbits(bits, bitorder="little")[np.repeat(methods == _BITMAP, width)]
    # All are below 2 ** 31 by now; the negative ones need not be above -2 ** 31.
    gaps, sizes = _gaps(positions[methods == _GAPS].clip(min=-1).astype(np.int32, copy=False))
    return b"".join(part.tobytes() for part in (methods.astype(np.uint8), sizes, bitmaps, gaps))


def _gaps(positions: Ints) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Return the gaps of some rows in a row, and how many bytes each row takes."""
    ordered = np.sort(positions, axis=1)  # what is no key comes first
    named = ordered >= 0
    before = np.concatenate([np.full((len(ordered), 1), -1, np.int32), ordered[:, :-1]], axis=1)
    gaps = (ordered - np.maximum(before, -1) - 1)[named]
    passed = gaps // _ESCAPE
    ends = np.cumsum(passed + 1) - 1
    out = np.full(ends[-1] + 1 if len(ends) else 0, _ESCAPE, np.uint8)
    out[ends] = gaps % _ESCAPE
    counts = np.count_nonzero(named, axis=1)
    behind = np.concatenate([[0], np.cumsum(passed + 1)])[np.concatenate([[0], np.cumsum(counts)])]
    return out, np.diff(behind).astype("<u4")


def decode(blob: bytes, visible: Ints, width: int) -> Ints:
    """Return the rows that :func:`encode` made bytes of.

    Args:
        blob: the bytes.
        visible: ``[rows]``, as they were encoded with.
        width: of the result, at least the number of keys of every row.

    Returns:
        ``[rows, width]`` int32, ascending, -1 at the tail.

    Raises:
        WrongRows: these are not the bytes of such rows.
    """
    out = np.full((len(visible), width), -1, np.int32)
    at = 0
    for first in range(0, len(visible), _ROWS):
        size = int.from_bytes(blob[at : at + 4], "little")
        rows = slice(first, first + _ROWS)
        _decode(blob[at + 4 : at + 4 + size], visible[rows].astype(np.int64), out[rows])
        at += 4 + size
    if at != len(blob):
        raise WrongRows(f"bytes of a selection are {len(blob)} and not {at}")
    return out


def _decode(blob: bytes, seen: Longs, out: Ints) -> None:
    rows = len(seen)
    data = np.frombuffer(blob, np.uint8)
    methods = data[:rows]
    if len(methods) < rows or (methods > _GAPS).any():
        raise WrongRows("bytes of a selection do not begin with the forms of its rows")
    in_gaps, in_bitmap = methods == _GAPS, methods == _BITMAP
    at = rows + 4 * np.count_nonzero(in_gaps)
    sizes = np.frombuffer(data[rows:at].tobytes(), "<u4").astype(np.int64)
    bitmap_bytes = (seen[in_bitmap] + 7) // 8
    end = at + int(bitmap_bytes.sum())
    if len(data) != end + sizes.sum():
        raise WrongRows(f"bytes of a selection are {len(data)} and not {end + sizes.sum()}")
    complete = np.flatnonzero(methods == _COMPLETE)
    _fill(out, complete, _runs_up(seen[complete]), seen[complete], seen)
    # [keys] ascending in bits, and where each row's begin among them
    bits = np.flatnonzero(np.unpackbits(data[at:end], bitorder="little").view(np.bool_))
    begins = np.concatenate([[0], np.cumsum(bitmap_bytes * 8)])
    counts = np.diff(np.searchsorted(bits, begins))
    _fill(out, np.flatnonzero(in_bitmap), bits - np.repeat(begins[:-1], counts), counts, seen)
    steps = data[end:]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    keys = np.flatnonzero(steps != _ESCAPE)
    passed = np.concatenate([[0], np.cumsum(steps, dtype=np.int64)])
    counts = np.diff(np.searchsorted(keys, begins))
    # Every key before it in its row has passed one position more than its gap says.
    positions = passed[keys + 1] - np.repeat(passed[begins[:-1]], counts) + _runs_up(counts)
    _fill(out, np.flatnonzero(in_gaps), positions, counts, seen)


def _runs_up(counts: Longs) -> Longs:
    """Return 0, 1, ... up to each of the counts, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _fill(out: Ints, rows: Longs, positions: Longs, counts: Longs, seen: Longs) -> None:
    """Write some rows' positions to the front of these rows."""
    if not len(rows):
        return
    if counts.max() > out.shape[1]:
        raise WrongRows(f"a row of a selection lists more than {out.shape[1]} keys")
    if (positions >= np.repeat(seen[rows], counts)).any():
        raise WrongRows("a selection lists keys that its row does not see")
    out[np.repeat(rows, counts), _runs_up(counts)] = positions
