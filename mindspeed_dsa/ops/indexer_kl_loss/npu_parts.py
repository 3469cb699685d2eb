"""Parts of a call of the sparse loss on Ascend NPUs, none with longer sequences than the operator takes.

The loss is a sum over rows, so that rows may come in any number of calls. A part of a long sequence has the
keys up to its end: its last row sees the last of them, as the operator wants it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from mindspeed_dsa.ops.npu.layout import Layout


@dataclass(frozen=True)
class Part:
    """Rows and keys of one call, as places in packed tensors."""

    rows: slice
    keys: slice
    ends: list[int] | None = None
    """Ends of its sequences from its first row on (TND); None where a batch's rows are one each (BSND)."""
    alone: bool = False
    """Whether it is cut out of packed sequences, and is a batch of one."""

    def of(self, tensor: Tensor, axis: int, places: slice) -> Tensor:
        """Cut its rows or keys out of a tensor, contiguous.

        Args:
            tensor: packed.
            axis: of rows or keys.
            places: :attr:`rows` or :attr:`keys`.
        """
        piece = tensor.narrow(axis, places.start, places.stop - places.start)
        return (piece[None] if self.alone else piece).contiguous()


def parts_of(layout: Layout, longest: int, most: int) -> list[Part]:
    """The calls that a layout takes, in the order of its rows.

    Args:
        layout: of the whole.
        longest: rows of a sequence in one call.
        most: sequences in one call.
    """
    if layout.sequences is None:
        shift = layout.key_length - layout.query_length
        cuts = _cuts(layout.query_length, longest)
        return [Part(slice(first, end), slice(0, end + shift)) for first, end in cuts]
    return list(_of_sequences(layout.sequences, longest, most))


def _of_sequences(lengths: tuple[int, ...], longest: int, most: int) -> Iterator[Part]:
    together: list[int] = []
    begin = 0  # of those together
    for length in (*lengths, None):
        if together and (length is None or length > longest or len(together) == most):
            rows = slice(begin, begin + sum(together))
            yield Part(rows, rows, ends=list(accumulate(together)))
            begin, together = rows.stop, []
        if length is not None and length > longest:
            for first, end in _cuts(length, longest):
                yield Part(slice(begin + first, begin + end), slice(begin, begin + end), alone=True)
            begin += length
        elif length is not None:
            together.append(length)


def _cuts(length: int, longest: int) -> list[tuple[int, int]]:
    return [(first, min(first + longest, length)) for first in range(0, length, longest)]
