"""Block-wise FP8 weights, ``float8_e4m3fn`` with one factor per block, as in DeepSeek's files.

A weight is ``fp8 * factor`` (``weight_dequant`` in DeepSeek-V3's inference code): the product in fp32,
rounded to bf16. Blocks start at the weight's first row and column, and the last blocks may be cut.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_dsa.runs.files import RunError

BLOCK = (128, 128)
"""Default rows and columns of a block."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
POWERS_OF_TWO = "ue8m0"
"""Value of ``scale_fmt`` in the configuration for power-of-two factors, as in DeepSeek-V3.1."""
_SMALLEST_POWER = -126
"""Exponent of the smallest normal fp32 number; ``float8_e8m0fnu`` has one more power below it."""
_SATURATES = LARGEST + 16
"""Quotient above which e4m3 has no nearest number: half a step (16) above the largest."""
_FACTORS_BELOW = 2.0**120
"""Upper bound of factors: from here on 448 * factor overflows bf16 (448 x 2^120 = 1.75 x 2^128)."""
_SCRATCH = 2**18  # elements per pass: 1 MiB in fp32, which stays in a core's cache
_MAGNITUDE, _NAN = 0x3F80, 0x3F80  # e4m3's seven magnitude bits, moved into fp16; all bits set is NaN


def factors_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """Return the shape of a weight's factors: one per block of the last two dimensions."""
    *stack, rows, columns = shape
    return (*stack, math.ceil(rows / block[0]), math.ceil(columns / block[1]))


def wrong_factor(factors: Tensor, weight: Tensor | None = None, block: tuple[int, int] = BLOCK) -> str | None:
    """Return value and position of a factor that cannot be used; ``None`` if all can.

    Factors are positive, and small enough for bf16. 0 is the factor of a block that holds only zeros.

    Args:
        factors: fp32 ``[rows of blocks, columns of blocks]``.
        weight: ``float8_e4m3fn`` weight, needed only for factors of 0.
        block: rows and columns of a block.
    """
    wrong = ~((factors > 0) & (factors < _FACTORS_BELOW))
    if not wrong.any():
        return None
    zero = factors == 0
    if weight is not None and zero.any():
        height, width = block
        for band in zero.any(1).nonzero().flatten().tolist():
            # Both zeros of e4m3 have no bits but the sign's.
            used = (weight[band * height : (band + 1) * height].view(torch.uint8) & 0x7F).amax(0) > 0
            of_blocks = torch.stack([columns.any() for columns in used.split(width)])
            wrong[band] &= ~zero[band] | of_blocks
        if not wrong.any():
            return None
    position = [int(index) for index in wrong.nonzero()[0]]
    return f"{float(factors[tuple(position)])} at {position}"


def dequantise(
    weight: Tensor,
    factors: Tensor,
    out: Tensor,
    first_row: int = 0,
    first_column: int = 0,
    block: tuple[int, int] = BLOCK,
) -> int:
    """Dequantise a part of a weight into ``out``: fp32 products rounded to bf16, then cast to its dtype.

    Args:
        weight: part of the weight, ``float8_e4m3fn`` ``[rows, columns]`` on the CPU.
        factors: fp32 factors of all blocks of the whole weight, checked with :func:`wrong_factor`.
        out: floating point ``[rows, columns]``, of any strides and device.
        first_row: first row of the part in the weight.
        first_column: first column of the part in the weight.
        block: rows and columns of a block.

    Returns:
        Number of NaN in the part.
    """
    rows, columns = weight.shape
    nans = 0
    if weight.numel() == 0:
        return nans
    height, width = block
    blocks = slice(first_column // width, math.ceil((first_column + columns) / width))
    skipped = first_column % width
    at_once = max(1, min(rows, _SCRATCH // columns))
    bits = torch.empty(at_once, columns, dtype=torch.int16)
    products = torch.empty(at_once, columns)
    begin = 0
    while begin < rows:
        band, within = divmod(first_row + begin, height)
        bands = min(at_once, rows - begin) // height if within == 0 else 0
        # Take several whole bands at once if they are narrow, else rows of one band.
        count = bands * height or min(at_once, rows - begin, height - within)
        scale = factors[band : band + max(bands, 1), blocks].repeat_interleave(width, dim=1)
        # The factor takes the 2^8 that the bits in fp16 lack; see below.
        scale = scale[:, skipped : skipped + columns] * 2.0**8
        part, exact, product = weight[begin : begin + count], bits[:count], products[:count]
        # Casts of e4m3 to fp32 are not vectorised in torch's CPU build, but casts of fp16 are. The bits of
        # e4m3, moved into fp16, are the value times 2^-8, subnormal numbers included.
        exact.copy_(part.view(torch.int8)).mul_(2**7).bitwise_and_(_MAGNITUDE | -(2**15))
        product.copy_(exact.view(torch.float16))
        # e4m3's NaN would become a number in fp16, so a part with NaN is cast directly.
        if int((exact & _MAGNITUDE).max()) == _NAN:
            nans += int(((exact & _MAGNITUDE) == _NAN).sum())
            product.copy_(part.float() * 2.0**-8)
        product.view(len(scale), -1, columns).mul_(scale[:, None])
        into = out[begin : begin + count]
        into.copy_(product if into.dtype == torch.bfloat16 else product.bfloat16())
        begin += count
    return nans


def quantise(
    weight: Tensor,
    factors: Tensor | None = None,
    block: tuple[int, int] = BLOCK,
    powers_of_two: bool = False,
    factors_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Quantise a weight to FP8 and return it with its factors; inverse of :func:`dequantise`.

    Quotients are computed in fp32, clamped to +-448 and rounded to nearest even. Quantising with the factors
    that a weight was read with restores the stored bytes, for factors of at least 2^-117. Below that,
    products can be subnormal in bf16.

    Args:
        weight: floating point ``[rows, columns]`` on the CPU, a whole weight or from the start of a block on.
        factors: fp32 factors of these rows. By default the largest magnitude of each block / 448, at least
            2^-126, and 1 for a block of zeros. A block that training has outgrown gets such a new factor
            instead of being clamped.
        block: rows and columns of a block.
        powers_of_two: whether to round new factors up to powers of two.
        factors_dtype: dtype that new factors are rounded to; they are returned in fp32.

    Returns:
        ``float8_e4m3fn`` ``[rows, columns]`` and fp32 ``[ceil(rows / 128), ceil(columns / 128)]``.

    Raises:
        RunError: the weight has NaN, infinities, or numbers whose factor :func:`wrong_factor` would reject.
    """
    # Why the bytes are restored: bf16 has 8 significant bits, so rounding moves a product by at most 2^-8 of
    # itself. e4m3 has 4, so its quotient would have to move by 2^-5 to round to another number.
    rows, columns = weight.shape
    height, width = block
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.ones(factors_shape((rows, columns), block)) if factors is None else factors
    scratch = torch.empty(min(rows, height), columns)
    for band, begin in enumerate(range(0, rows, height)):
        part = weight[begin : begin + height]
        values = scratch[: len(part)].copy_(part)
        of_columns = torch.maximum(values.amax(0), -values.amin(0))
        largest = torch.stack([columns_of_block.amax() for columns_of_block in of_columns.split(width)])
        fresh = (largest / LARGEST).clamp(min=2.0**_SMALLEST_POWER)
        fresh = _power_above(fresh) if powers_of_two else fresh.to(factors_dtype).float()
        fresh = torch.where(largest > 0, fresh, 1.0)
        # Numbers are read as bf16, and rounding to bf16 may give an infinity.
        if not (largest.bfloat16().isfinite() & (fresh < _FACTORS_BELOW)).all():
            raise RunError(
                f"rows {begin} to {begin + len(values)} hold NaN or infinities, or numbers beyond "
                f"{LARGEST * _FACTORS_BELOW / 2:.2g}, which FP8 blocks cannot; export in bf16, and look for "
                "the step at which training diverged"
            )
        if factors is None:
            scales[band] = fresh
        elif (outgrown := largest > _SATURATES * scales[band]).any():
            scales = scales.clone() if scales is factors else scales
            scales[band] = torch.where(outgrown, fresh, scales[band])
        # The factor 0 of a block of zeros would make them NaN.
        scale = torch.where(scales[band] > 0, scales[band], 1.0).repeat_interleave(width)[:columns]
        quantised[begin : begin + height].copy_(values.div_(scale).clamp_(-LARGEST, LARGEST))
    return quantised, scales


def _power_above(numbers: Tensor) -> Tensor:
    """Return the smallest power of two that is at least each number."""
    # frexp is exact, log2 is not.
    mantissa, exponent = torch.frexp(numbers)  # the mantissa is in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(numbers), exponent.clamp(min=_SMALLEST_POWER))
