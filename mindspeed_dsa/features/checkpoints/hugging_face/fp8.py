"""Weights in blocks of ``float8_e4m3fn`` with one factor each, as DeepSeek's files have them.

The weight is ``fp8 * factor`` (``weight_dequant`` in DeepSeek-V3's inference code): the product in fp32,
rounded to bf16. Blocks begin at the weight's first row and column; those at its end are cut.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_dsa.runs.files import RunError

BLOCK = (128, 128)
"""Rows and columns of a block, unless the model's description has others."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
POWERS_OF_TWO = "ue8m0"
"""Configuration's ``scale_fmt`` of factors that are powers of two, as DeepSeek-V3.1 has it."""
_SMALLEST_POWER = -126
"""Exponent of the smallest one that fp32 has with all its digits; ``float8_e8m0fnu`` has one below it."""
_SATURATES = LARGEST + 16
"""Half a step above the largest number: from here on a quotient would be rounded to what there is not."""
_FACTORS_BELOW = 2.0**120
"""From here on the largest weight of a block overflows bf16."""
_SCRATCH = 2**18  # elements that are worked on at once: 1 MiB in fp32, which stays in a core's cache
_MAGNITUDE, _NAN = 0x3F80, 0x3F80  # the seven bits of a magnitude, moved into fp16; all of them set is NaN


def factors_shape(shape: tuple[int, ...], block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """Return the shape of a weight's factors: one for each block of the last two dimensions."""
    *stack, rows, columns = shape
    return (*stack, math.ceil(rows / block[0]), math.ceil(columns / block[1]))


def wrong_factor(factors: Tensor) -> str | None:
    """Say which of a weight's factors is not a positive number of a size that weights can have, and where."""
    wrong = ~((factors > 0) & (factors < _FACTORS_BELOW))
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
) -> None:
    """Write a part of a weight into ``out``: the fp32 products rounded to bf16, then in ``out``'s dtype.

    Casts of ``float8_e4m3fn`` to fp32 are not vectorised in torch's CPU build. Its bits, moved into fp16, are
    the value times 2^-8, subnormal ones included, and casts of fp16 are; the power of two goes into the
    factors, which is exact. NaN stays NaN.

    Args:
        weight: ``float8_e4m3fn`` ``[rows, columns]`` on the CPU, the part at ``first_row`` and
            ``first_column``.
        factors: fp32 of all blocks of the whole weight, which :func:`wrong_factor` has found right.
        out: floating point ``[rows, columns]``, of any strides and device.
        first_row: the part's first row in the weight.
        first_column: the part's first column in the weight.
        block: rows and columns of a block.
    """
    rows, columns = weight.shape
    if weight.numel() == 0:
        return
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
        # Several whole bands at once where they are narrow, else rows of one.
        count = bands * height or min(at_once, rows - begin, height - within)
        scale = factors[band : band + max(bands, 1), blocks].repeat_interleave(width, dim=1)
        scale = scale[:, skipped : skipped + columns] * 2.0**8
        part, exact, product = weight[begin : begin + count], bits[:count], products[:count]
        exact.copy_(part.view(torch.int8)).mul_(2**7).bitwise_and_(_MAGNITUDE | -(2**15))
        product.copy_(exact.view(torch.float16))
        if int((exact & _MAGNITUDE).max()) == _NAN:
            product.copy_(part.float() * 2.0**-8)
        product.view(len(scale), -1, columns).mul_(scale[:, None])
        into = out[begin : begin + count]
        into.copy_(product if into.dtype == torch.bfloat16 else product.bfloat16())
        begin += count


def quantise(
    weight: Tensor,
    factors: Tensor | None = None,
    block: tuple[int, int] = BLOCK,
    powers_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return a weight in FP8 and its factors: the inverse of :func:`dequantise`.

    Quotients are formed in fp32, held within 448 and rounded to nearest even. With the factors that it was
    read with, a weight becomes the very bytes that it was read from: rounding to bf16, which has 8
    significant bits, moves a product by 2^-8 of itself at most, and the quotient would have to move by 2^-5
    of itself to lie nearer to another number of e4m3, which has 4. Smaller factors than 2^-117 are the
    exception: their products can be subnormal in bf16.

    Args:
        weight: floating point ``[rows, columns]`` on the CPU, whole or from a block's first row on.
        factors: fp32, of the blocks of these rows; ``None`` chooses the largest magnitude of a block / 448,
            2^-126 at least, and 1 for a block of zeros. A block that has outgrown its factor, as training may
            let it, gets one that is chosen so, rather than being cut off.
        block: rows and columns of a block.
        powers_of_two: chosen factors are rounded up to such.

    Returns:
        ``float8_e4m3fn`` ``[rows, columns]`` and fp32 ``[ceil(rows / 128), ceil(columns / 128)]``.

    Raises:
        RunError: the weight holds what FP8 cannot: NaN, infinities, or numbers whose factor
            :func:`wrong_factor` would refuse.
    """
    rows, columns = weight.shape
    height, width = block
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    chosen = torch.ones(factors_shape((rows, columns), block)) if factors is None else factors
    scratch = torch.empty(min(rows, height), columns)
    for band, begin in enumerate(range(0, rows, height)):
        part = weight[begin : begin + height]
        values = scratch[: len(part)].copy_(part)
        of_columns = torch.maximum(values.amax(0), -values.amin(0))
        largest = torch.stack([each.amax() for each in of_columns.split(width)])
        own = (largest / LARGEST).clamp(min=2.0**_SMALLEST_POWER)
        own = torch.where(largest > 0, _power_above(own) if powers_of_two else own, 1.0)
        # Rounded to bf16, as it is read, a number may become an infinity.
        if not (largest.bfloat16().isfinite() & (own < _FACTORS_BELOW)).all():
            raise RunError(
                f"rows {begin} to {begin + len(values)} hold NaN or infinities, or numbers beyond "
                f"{LARGEST * _FACTORS_BELOW / 2:.2g}, which FP8 blocks cannot; export in bf16, and look for "
                "the step at which training diverged"
            )
        if factors is None:
            chosen[band] = own
        elif (outgrown := largest > _SATURATES * chosen[band]).any():
            chosen = chosen.clone() if chosen is factors else chosen
            chosen[band] = torch.where(outgrown, own, chosen[band])
        scale = chosen[band].repeat_interleave(width)[:columns]
        quantised[begin : begin + height].copy_(values.div_(scale).clamp_(-LARGEST, LARGEST))
    return quantised, chosen


def _power_above(numbers: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each number; exact, where a logarithm is not."""
    mantissa, exponent = torch.frexp(numbers)  # the mantissa is in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(numbers), exponent.clamp(min=_SMALLEST_POWER))
