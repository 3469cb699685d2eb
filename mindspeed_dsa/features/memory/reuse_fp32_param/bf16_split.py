"""Lossless split of float32 numbers into their bfloat16 rounding and 16 more bits.

Read as integers, the bits of a float32 and of its bfloat16 rounding differ by at most 0x8000, in either
direction. The lower half of the float32 is this difference modulo 2^16. The lower half identifies every
difference except +0x8000 and -0x8000, which are ties that were rounded down and up. So 65,537 float32 numbers
round to the same even bfloat16, one more than 16 bits can encode.

The lower half 0x8000 decodes as +0x8000. Numbers with the difference -0x8000 are kept in a side list with
their upper half; these are about one in 2^17 of uniformly distributed numbers. The list also has NaNs whose
difference is larger, but NaNs that arithmetic produces need no entry.

torch's own conversion computes the bfloat16 number. No rounding mode can break the inverse, because every
number that does not round-trip goes to the side list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_QUIET = 0x40  # quiet bit: turns any bfloat16 with all exponent bits set into a NaN

# Multiplier for a left shift by 16 bits: torch_npu 2.9 has no shift kernel and would run it on the host.
_UPPER = 1 << 16


class Halves(NamedTuple):
    """Result of splitting ``n`` numbers, with ``e`` numbers in the side list.

    Attributes:
        weight: bfloat16 ``[n]``, rounded to nearest even.
        low: int16 ``[n]``, lower halves of the float32.
        where: int64 ``[e]``, ascending positions of the listed numbers.
        high: int16 ``[e]``, upper halves of the listed numbers.
    """

    weight: Tensor
    low: Tensor
    where: Tensor
    high: Tensor


def split(words: Tensor) -> Halves:
    """Split contiguous float32 ``[n]`` on a little-endian machine; the result owns its memory."""
    bits = words.view(torch.int32)
    # Reinterpret the memory as int16: whether a conversion from int32 wraps depends on the device.
    halves = words.view(torch.int16)
    weight, low = words.to(torch.bfloat16), halves[0::2].clone(memory_format=torch.contiguous_format)
    where = _inexact(bits, weight, low)
    if where.numel() and bool(words[where].isnan().any()):
        # Build NaNs from their own upper half, so that sign and payload survive whatever NaN torch's rounding
        # returns. Few NaNs then need the list.
        high = halves[1::2]
        weight = torch.where(words.isnan(), high | _QUIET, weight.view(torch.int16)).view(torch.bfloat16)
        where = _inexact(bits, weight, low)
    return Halves(weight, low, where, halves[1::2][where])


def _inexact(bits: Tensor, weight: Tensor, low: Tensor) -> Tensor:
    """Return the ascending positions, int64 ``[e]``, of numbers that do not round-trip."""
    joined = _join(weight, low)
    # On CPU `nonzero` is slow, so compare first. On a device both calls wait for the result.
    if bits.device.type == "cpu" and torch.equal(joined, bits):
        return torch.empty(0, dtype=torch.int64, device=bits.device)
    return joined.bitwise_xor_(bits).nonzero().flatten()


def join(halves: Halves) -> Tensor:
    """Return the float32 ``[n]`` that were passed to :func:`split`, bit for bit."""
    bits = _join(halves.weight, halves.low)
    if halves.where.numel():
        bits[halves.where] = (halves.high.to(torch.int32) * _UPPER) | (
            halves.low[halves.where].to(torch.int32) & 0xFFFF
        )
    return bits.view(torch.float32)


def _join(weight: Tensor, low: Tensor) -> Tensor:
    """Join the halves into int32 ``[n]``, without the side list."""
    # Subtract 1 in int16 and add it back in int32: 0x8000 - 1 = 0x7FFF, so 0x8000 becomes +32768, not -32768.
    return (low - 1).to(torch.int32).add_(1).add_(_as_words(weight))


def _as_words(weight: Tensor) -> Tensor:
    """Convert bfloat16 to float32 without rounding, and return the bits as int32."""
    return weight.view(torch.int16).to(torch.int32).mul_(_UPPER)
