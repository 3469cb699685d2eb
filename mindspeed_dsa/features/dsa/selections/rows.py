"""Selected keys of rows as bytes, compressed by zlib.

A row's keys are positions ``0 <= k < visible`` of which none comes twice. 256 rows at a time are a block, in
the shorter of two forms:

* *bits*: one bit for each key that the row with the most keys sees, packed by rows;
* *gaps*: the number of keys that each row lists, and the number of positions between a key and the one before
  it, ascending, the lowest bytes of all gaps first.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

_BITS, _GAPS = b"b", b"g"
# Arrays of a block stay in the cache, however many rows there are.
_ROWS = 256


class WrongRows(ValueError):
    """Rows that no selection has, or bytes that are no rows.

    Attributes:
        row: the first one, from 0; -1 where it is not known.
    """

    def __init__(self, problem: str, row: int = -1) -> None:
        super().__init__(problem)
        self.row = row


def ascending(keys: npt.NDArray[Any], visible: Ints) -> Ints:
    """Return the keys of each row in order, -1 at the tail.

    Args:
        keys: ``[rows, width]`` of any integer type, in any order, negative where there is no key.
        visible: ``[rows]``, number of keys that each row sees.

    Raises:
        WrongRows: a key is not visible, or comes twice.
    """
    if keys.dtype == np.uint64:
        keys = np.minimum(keys, np.uint64(np.iinfo(np.int64).max))
    # Narrowed only where every key is below 2 ** 31: 2 ** 32 + 1 is no key 1.
    if keys.dtype != np.int32:
        keys = keys.astype(np.int64, copy=False)
    beyond = (keys >= visible[:, None]).any(axis=1)
    if beyond.any():
        row = int(beyond.argmax())
        raise WrongRows(f"lists key {keys[row].max()} and sees {visible[row]} keys", row)
    if keys.dtype != np.int32:
        keys = np.maximum(keys, -1).astype(np.int32)
    # Negative ones come last without a sign.
    ordered = np.sort(np.ascontiguousarray(keys).view(np.uint32), axis=1).view(np.int32)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        row = int(twice.any(axis=1).argmax())
        raise WrongRows(f"lists key {ordered[row, 1:][twice[row]][0]} more than once", row)
    return np.maximum(ordered, -1, out=ordered)


def encode(keys: npt.NDArray[Any], visible: Ints) -> bytes:
    """Return rows as bytes; arguments and errors as of :func:`ascending`."""
    parts = []
    for first in range(0, len(keys), _ROWS):
        rows = slice(first, first + _ROWS)
        try:
            ordered = ascending(keys[rows], visible[rows])
        except WrongRows as error:
            raise WrongRows(str(error), first + error.row) from None
        form, data = _block(ordered, visible[rows])
        # Its matches of distance one find runs of zeros, and it is several times as fast as others.
        compressor = zlib.compressobj(1, strategy=zlib.Z_RLE)
        packed = compressor.compress(data) + compressor.flush()
        parts += [len(packed).to_bytes(4, "little"), form, packed]
    return b"".join(parts)


def _block(ordered: Ints, visible: Ints) -> tuple[bytes, bytes]:
    """Return the form of some rows, and their bytes in it."""
    listed = ordered >= 0
    widest, counts = int(visible.max(initial=0)), np.count_nonzero(listed, axis=1)
    if len(ordered) * widest <= 8 * counts.sum():
        bits = np.zeros((len(ordered), widest + 1), np.bool_)
        bits[np.arange(len(ordered))[:, None], ordered] = True  # the last column, for entries of -1
        return _BITS, np.packbits(bits[:, :-1], axis=1).tobytes()
    gaps = (np.diff(ordered, axis=1, prepend=-1) - 1)[listed].astype("<u4")
    in_planes = gaps.view(np.uint8).reshape(-1, 4).T
    return _GAPS, counts.astype("<u4").tobytes() + in_planes.tobytes()


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
    parts, at = [np.zeros((0, width), np.int32)], 0
    for first in range(0, len(visible), _ROWS):
        size = int.from_bytes(blob[at : at + 4], "little")
        form, packed = blob[at + 4 : at + 5], blob[at + 5 : at + 5 + size]
        parts.append(_rows(form, packed, visible[first : first + _ROWS], width))
        at += 5 + size
    if at != len(blob):
        raise WrongRows(f"bytes of a selection are {len(blob)} and not {at}")
    return np.concatenate(parts)


def _rows(form: bytes, packed: bytes, visible: Ints, width: int) -> Ints:
    """Return the rows of one block."""
    rows, widest = len(visible), int(visible.max(initial=0))
    out = np.zeros((rows, width), np.int64)
    try:
        # No more than a block can have, whatever the bytes say.
        decompressor = zlib.decompressobj()
        data = np.frombuffer(
            decompressor.decompress(packed, max(rows * widest, 4 * rows * (width + 1)) + 1), np.uint8
        )
        # A stream without its end gives what it has, and no error.
        if not decompressor.eof or decompressor.unused_data:
            raise WrongRows("bytes of a selection end before or after their rows")
        if form == _BITS:
            bits = np.unpackbits(data.reshape(rows, -(-widest // 8)), axis=1, count=widest).view(np.bool_)
            counts, values = np.count_nonzero(bits, axis=1), np.flatnonzero(bits) % max(widest, 1)
        elif form == _GAPS:
            counts = data[: 4 * rows].view("<u4").astype(np.int64).reshape(rows)
            values = data[4 * rows :].reshape(4, counts.sum()).T.copy().view("<u4")[:, 0].astype(np.int64) + 1
        else:
            raise WrongRows("bytes of a selection name no form of rows")
        listed = np.arange(width) < counts[:, None]
        out[listed] = values
    except (ValueError, zlib.error) as error:
        raise WrongRows(f"bytes of a selection are damaged ({error})") from error
    if form == _GAPS:
        out = np.cumsum(out, axis=1) - 1
    if (listed & (out >= visible[:, None])).any() or (counts > width).any():
        raise WrongRows("a selection lists keys that its row does not see, or too many")
    return np.where(listed, out, -1).astype(np.int32)
