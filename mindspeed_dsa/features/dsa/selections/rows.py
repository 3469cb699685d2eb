"""Encoding of selected keys as bytes, compressed with zlib.

A row is the set of keys of one query token: distinct positions ``0 <= k < visible``. Blocks of 256 rows are
written in the shorter of two encodings:

* *bits*: bitmask with one bit per key, as wide as the largest ``visible`` in the block, packed by rows.
* *gaps*: number of keys per row, then the gaps between consecutive ascending keys, minus one. The lowest
  bytes of all gaps come first, then the second bytes, and so on.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

_BITS, _GAPS = b"b", b"g"
# Small enough that the arrays of a block stay in the CPU cache.
_ROWS = 256


class WrongRows(ValueError):
    """Error for invalid rows, or for bytes that do not encode rows.

    Attributes:
        row: index of the first invalid row, from 0; -1 if unknown.
    """

    def __init__(self, problem: str, row: int = -1) -> None:
        super().__init__(problem)
        self.row = row


def ascending(keys: npt.NDArray[Any], visible: Ints) -> Ints:
    """Sort the keys of each row in ascending order, with -1 at the tail.

    Args:
        keys: selected keys ``[rows, width]``, any integer type, in any order, negative for no key.
        visible: number of keys that each query token sees, ``[rows]``.

    Raises:
        WrongRows: a key is not visible, or appears twice.
    """
    if keys.dtype == np.uint64:
        keys = np.minimum(keys, np.uint64(np.iinfo(np.int64).max))
    # Cast to int32 only after the range check: 2 ** 32 + 1 would wrap to key 1.
    if keys.dtype != np.int32:
        keys = keys.astype(np.int64, copy=False)
    beyond = (keys >= visible[:, None]).any(axis=1)
    if beyond.any():
        row = int(beyond.argmax())
        raise WrongRows(f"lists key {keys[row].max()} and sees {visible[row]} keys", row)
    if keys.dtype != np.int32:
        keys = np.maximum(keys, -1).astype(np.int32)
    # As uint32, -1 is the largest value, so that it sorts to the tail.
    ordered = np.sort(np.ascontiguousarray(keys).view(np.uint32), axis=1).view(np.int32)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        row = int(twice.any(axis=1).argmax())
        raise WrongRows(f"lists key {ordered[row, 1:][twice[row]][0]} more than once", row)
    return np.maximum(ordered, -1, out=ordered)


def encode(keys: npt.NDArray[Any], visible: Ints) -> bytes:
    """Encode rows as bytes. Arguments and errors are as for :func:`ascending`."""
    parts = []
    for first in range(0, len(keys), _ROWS):
        rows = slice(first, first + _ROWS)
        try:
            ordered = ascending(keys[rows], visible[rows])
        except WrongRows as error:
            raise WrongRows(str(error), first + error.row) from None
        form, data = _block(ordered, visible[rows])
        # Z_RLE only matches runs of one byte, which is enough for the zeros, and several times as fast.
        compressor = zlib.compressobj(1, strategy=zlib.Z_RLE)
        packed = compressor.compress(data) + compressor.flush()
        # Block: length of the packed data (4 bytes), form (1 byte), packed data.
        parts += [len(packed).to_bytes(4, "little"), form, packed]
    return b"".join(parts)


def _block(ordered: Ints, visible: Ints) -> tuple[bytes, bytes]:
    """Encode a block of rows; return the kind of encoding, and the bytes before compression."""
    listed = ordered >= 0
    widest, counts = int(visible.max(initial=0)), np.count_nonzero(listed, axis=1)
    # Bits take rows * widest / 8 bytes. Gaps count as one byte per key, as most high bytes compress away.
    if len(ordered) * widest <= 8 * counts.sum():
        bits = np.zeros((len(ordered), widest + 1), np.bool_)  # [rows, widest + 1]
        # Entries of -1 set the last column, which is cut off.
        bits[np.arange(len(ordered))[:, None], ordered] = True
        return _BITS, np.packbits(bits[:, :-1], axis=1).tobytes()
    # prepend=-1: the first gap counts from position 0. Keys 2 3 7 -> gaps 2 0 3.
    gaps = (np.diff(ordered, axis=1, prepend=-1) - 1)[listed].astype("<u4")  # [keys of all rows]
    # [4, keys]: high bytes are mostly zero, and compress well next to each other
    in_planes = gaps.view(np.uint8).reshape(-1, 4).T
    return _GAPS, counts.astype("<u4").tobytes() + in_planes.tobytes()


def decode(blob: bytes, visible: Ints, width: int) -> Ints:
    """Decode rows encoded by :func:`encode`.

    Args:
        blob: encoded bytes.
        visible: number of keys that each query token sees, ``[rows]``, as passed to :func:`encode`.
        width: width of the result; at least the largest number of keys in a row.

    Returns:
        Keys ``[rows, width]`` int32, ascending, -1 at the tail.

    Raises:
        WrongRows: the bytes do not encode these rows.
    """
    parts, offset = [np.zeros((0, width), np.int32)], 0
    for first in range(0, len(visible), _ROWS):
        size = int.from_bytes(blob[offset : offset + 4], "little")
        form, packed = blob[offset + 4 : offset + 5], blob[offset + 5 : offset + 5 + size]
        parts.append(_rows(form, packed, visible[first : first + _ROWS], width))
        offset += 5 + size
    if offset != len(blob):
        raise WrongRows(f"bytes of a selection are {len(blob)} and not {offset}")
    return np.concatenate(parts)


def _rows(form: bytes, packed: bytes, visible: Ints, width: int) -> Ints:
    """Decode the rows of one block."""
    rows, widest = len(visible), int(visible.max(initial=0))
    out = np.zeros((rows, width), np.int64)
    try:
        # Limit the output to the size of a valid block, so that damaged bytes cannot exhaust memory.
        decompressor = zlib.decompressobj()
        data = np.frombuffer(
            decompressor.decompress(packed, max(rows * widest, 4 * rows * (width + 1)) + 1), np.uint8
        )
        # A truncated stream decompresses without an error.
        if not decompressor.eof or decompressor.unused_data:
            raise WrongRows("bytes of a selection end before or after their rows")
        if form == _BITS:
            # [rows, ceil(widest / 8)] bytes -> [rows, widest] bits
            bits = np.unpackbits(data.reshape(rows, -(-widest // 8)), axis=1, count=widest).view(np.bool_)
            counts, values = np.count_nonzero(bits, axis=1), np.flatnonzero(bits) % max(widest, 1)
        elif form == _GAPS:
            counts = data[: 4 * rows].view("<u4").astype(np.int64).reshape(rows)
            values = data[4 * rows :].reshape(4, counts.sum()).T.copy().view("<u4")[:, 0].astype(np.int64) + 1
        else:
            raise WrongRows("bytes of a selection name no form of rows")
        listed = np.arange(width) < counts[:, None]  # [rows, width]
        out[listed] = values
    except (ValueError, zlib.error) as error:
        raise WrongRows(f"bytes of a selection are damaged ({error})") from error
    if form == _GAPS:
        # Inverse of the gaps: gaps + 1 = 3 1 4, cumulated 3 4 8, minus 1: keys 2 3 7.
        out = np.cumsum(out, axis=1) - 1
    if (listed & (out >= visible[:, None])).any() or (counts > width).any():
        raise WrongRows("a selection lists keys that its row does not see, or too many")
    return np.where(listed, out, -1).astype(np.int32)
