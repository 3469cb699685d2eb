"""A float32 number as its bfloat16 rounding and sixteen more bits.

The bits of a float32, taken as a whole number, lie at most 0x8000 away from those of its rounding to
bfloat16, upwards or downwards. The lower half of the float32 is that difference modulo 2^16, which
distinguishes all differences but two: plus and minus 0x8000, a tie that was rounded down or up. An even
bfloat16 has 65,537 preimages, one more than sixteen bits can name. The lower half 0x8000 means plus; numbers
with minus are listed with their upper half, about one in 2^17 of evenly spread numbers. So are NaNs that lie
further from their rounding; a NaN that arithmetic makes does not.

The bfloat16 is made by torch's own conversion, so it is what torch would store; how that rounds any number
cannot make the way back inexact, because every number that does not come back is listed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_QUIET = 0x40  # the bit that makes a NaN of any bfloat16 with all exponent bits set

# A shift by 16 bits, for which torch_npu 2.9 has no kernel: it would go to the host and back.
_UPPER = 1 << 16


class Halves(NamedTuple):
    """``n`` numbers, split; ``e`` of them are listed.

    Attributes:
        weight: bfloat16 ``[n]``, round to nearest even.
        low: int16 ``[n]``, the lower half of each float32.
        where: int64 ``[e]``, ascending positions of the listed numbers.
        high: int16 ``[e]``, their upper halves.
    """

    weight: Tensor
    low: Tensor
    where: Tensor
    high: Tensor


def split(words: Tensor) -> Halves:
    """Split float32 ``[n]``, contiguous, on a little-endian machine; the result shares no memory with it."""
    bits = words.view(torch.int32)
    # The lower halves as they lie in memory: whether a conversion to int16 wraps is up to the device.
    halves = words.view(torch.int16)
    weight, low = words.to(torch.bfloat16), halves[0::2].clone(memory_format=torch.contiguous_format)
    where = _inexact(bits, weight, low)
    if where.numel() and bool(words[where].isnan().any()):
        # A NaN keeps sign and payload, whichever NaN torch's rounding gives: few are to be listed then.
        high = halves[1::2]
        weight = torch.where(words.isnan(), high | _QUIET, weight.view(torch.int16)).view(torch.bfloat16)
        where = _inexact(bits, weight, low)
    return Halves(weight, low, where, halves[1::2][where])


def _inexact(bits: Tensor, weight: Tensor, low: Tensor) -> Tensor:
    """Return ascending positions of numbers that their halves alone do not give back, int64 ``[e]``."""
    joined = _join(weight, low)
    # A search is slow on a CPU; a device is waited for by either.
    if bits.device.type == "cpu" and torch.equal(joined, bits):
        return torch.empty(0, dtype=torch.int64, device=bits.device)
    return joined.bitwise_xor_(bits).nonzero().flatten()


def join(halves: Halves) -> Tensor:
    """Return the float32 ``[n]`` that :func:`split` was given, bit for bit."""
    bits = _join(halves.weight, halves.low)
    if halves.where.numel():
        bits[halves.where] = (halves.high.to(torch.int32) * _UPPER) | (
            halves.low[halves.where].to(torch.int32) & 0xFFFF
        )
    return bits.view(torch.float32)


def _join(weight: Tensor, low: Tensor) -> Tensor:
    """Join the halves where nothing is listed, int32 ``[n]``."""
    # One less, and one more in 32 bits: so 0x8000 means itself and not its negative.
    return (low - 1).to(torch.int32).add_(1).add_(_as_words(weight))


def _as_words(weight: Tensor) -> Tensor:
    """bfloat16 as the bits of the float32 of the same value, int32."""
    return weight.view(torch.int16).to(torch.int32).mul_(_UPPER)
