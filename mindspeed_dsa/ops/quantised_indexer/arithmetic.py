"""FP8 index scores as inference engines compute them: e4m3 rows, one scale factor each, ordered sums.

The formulas are DeepSeek's ``act_quant`` and ``fp8_index`` (DeepSeek-V3.2-Exp, ``inference/kernel.py``). The
order of the sums, which they leave open, is fixed here. This is plain PyTorch: it gives the same bits on
every device that follows IEEE 754.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall

LARGEST = 448.0
"""Largest number of e4m3."""
SMALLEST_AMAX = 1e-4
"""Lower bound of a row's largest magnitude, as in DeepSeek's kernel."""
MOST_DIMENSIONS = 1 << 17
"""Number of dimensions up to which a scalar product of e4m3 numbers is exact in fp64.

e4m3 numbers are multiples of 2^-9 below 2^9. Their products are multiples of 2^-18 below 2^17.7, and fp64 has
53 bits.
"""
# Smallest normal number of e4m3, and steps per power of two, because significands have four bits. Smaller
# numbers have constant spacing.
_SMALLEST_NORMAL, _STEPS = 2.0**-6, 8
_EXPONENT, _FRACTION = 0x7F800000, 0x007FFFFF
# Maximum number of fp64 products held at once.
_PRODUCTS = 1 << 22
# Half a relative step of fp32, and a safety factor because the error bound itself is rounded.
_ROUNDING, _MARGIN = 2.0**-24, 1.1
# Upper bound of the loss when up to 2^8 products and sums fall below the normal numbers of fp32.
_UNDERFLOW = 2.0**-118
_FAR_FROM_OVERFLOW = 2.0**126


@dataclass(frozen=True)
class QuantisedCall(IndexerCall):
    """Arguments of the index scores for backends that quantise query and key.

    Attributes:
        powers_of_two: whether factors are rounded up to powers of two (``ue8m0``).
    """

    powers_of_two: bool = True


def quantise(rows: Tensor, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    """Quantise rows to e4m3 numbers with one factor each: ``values * factors`` approximates ``rows``.

    The factor of a row with infinities or NaN is NaN, which makes its scores NaN on all hardware. Inference
    engines give NaN too: they multiply zero with an infinite factor.

    Args:
        rows: ``[..., dim]``, floating point.
        powers_of_two: whether factors are rounded up to powers of two.

    Returns:
        Values, fp32 ``[..., dim]``, all of which are e4m3 numbers, and factors, fp32 ``[...]``.
    """
    rows = rows.detach().float()
    # DeepSeek's kernel multiplies by 1/448 in fp32. Rounded up to a power of two, a quotient gives the same
    # result.
    factors = rows.abs().amax(dim=-1).clamp_min_(SMALLEST_AMAX).mul_(1 / LARGEST)  # [...]
    wrong = ~factors.isfinite()
    if powers_of_two:
        factors = _power_above(factors)
    factors = factors.masked_fill_(wrong, torch.nan)
    return _in_e4m3((rows / factors[..., None]).clamp_(-LARGEST, LARGEST)), factors


def _power_above(numbers: Tensor) -> Tensor:
    """Return the smallest power of two that is at least each number; numbers are positive and normal."""
    # Adding the largest fraction carries into the exponent unless the number is a power of two.
    bits = numbers.view(torch.int32) + _FRACTION
    return (bits & _EXPONENT).view(torch.float32)


def _in_e4m3(numbers: Tensor) -> Tensor:
    """Round numbers within e4m3's range to e4m3, to nearest even; the result is fp32."""
    # Done in fp32, because on CPUs torch casts to float8_e4m3fn as fast but back at a sixth of the speed.
    bits = numbers.view(torch.int32)
    step = (bits & _EXPONENT).view(torch.float32).clamp_min_(_SMALLEST_NORMAL).div_(_STEPS)
    return (numbers / step).round_().mul_(step)


def exact_scores(query: Tensor, key: Tensor, weights: Tensor, factors: Tensor, use_relu: bool) -> Tensor:
    """Return the scores of quantised queries and keys, ``[..., rows, keys]`` fp32.

    A head's dot product is computed exactly in fp64 and rounded to fp32 once. Then ReLU is applied, and the
    result is multiplied with the weight and rounded. The heads are summed pairwise: of ``n`` remaining
    partial sums, number ``i + ceil(n / 2)`` is added to number ``i``, until one remains. This sum is
    multiplied with the key's factor.

    Args:
        query: ``[..., rows, heads, dim]`` fp32, e4m3 numbers.
        key: ``[..., keys, dim]`` fp32, e4m3 numbers.
        weights: ``[..., rows, heads]`` fp32, weights times the factors of the query.
        factors: ``[..., keys]`` fp32, factors of the keys.
        use_relu: whether the product of each head is clamped at zero.
    """
    *batch, rows, heads, dim = query.shape
    keys = key.shape[-2]
    scores = query.new_empty(*batch, rows, keys)  # [..., rows, keys]
    flat = query.double().reshape(*batch, rows * heads, dim)  # [..., rows * heads, dim]
    width = max(1, _PRODUCTS // max(1, flat.shape[:-1].numel()))
    for first in range(0, keys, width):
        part = slice(first, min(first + width, keys))
        products = torch.matmul(flat, key[..., part, :].double().mT).float()  # [..., rows * heads, width]
        products = products.view(*batch, rows, heads, part.stop - first)  # [..., rows, heads, width]
        if use_relu:
            products.relu_()
        products.mul_(weights[..., None])
        scores[..., part] = _sum_of_heads(products)
    return scores.mul_(factors[..., None, :])


def _sum_of_heads(products: Tensor) -> Tensor:
    """Return the sum over heads, ``[..., heads, keys]`` -> ``[..., keys]``; overwrites ``products``."""
    left = products.shape[-2]
    while left > 1:
        kept = (left + 1) // 2
        products[..., : left - kept, :].add_(products[..., kept:left, :])
        left = kept
    return products[..., 0, :]


def longest_key(key: Tensor, factors: Tensor) -> Tensor:
    """Return the Euclidean norm of each sequence's longest finite key, ``[batch]``."""
    return (torch.linalg.vector_norm(key, dim=-1) * factors).nan_to_num(0.0, 0.0, 0.0).amax(dim=-1)


def largest_difference(query: Tensor, weights: Tensor, length: Tensor, factor: float) -> Tensor:
    """Return a bound on the distance of a row's scores from :func:`exact_scores`, ``[..., rows]``.

    The bound holds for any order of fp32 sums. A sum of ``n`` exact numbers, in any order and rounded at each
    step, is off by at most ``n 2^-24`` times the sum of their magnitudes (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2). For a dot product this sum is at most the product of both vectors'
    lengths. The bound counts the roundings of ``dim`` products, of ``heads`` weighted products and of the
    key's factor, once for each of the two scores.

    Args:
        query: ``[..., rows, heads, dim]``, as in :func:`exact_scores`.
        weights: ``[..., rows, heads]``, as in :func:`exact_scores`.
        length: ``[...]``, length of the longest key.
        factor: largest factor of the keys.

    Returns:
        fp32; infinite if there is no bound, for rows that are not finite or whose sums might overflow.
    """
    heads, dim = query.shape[-2:]
    rounded = _MARGIN * _ROUNDING * (dim + 2 * heads + 8)
    magnitude = (weights.abs() * torch.linalg.vector_norm(query, dim=-1)).sum(dim=-1)  # [..., rows]
    difference = magnitude * (rounded * length[..., None]) + heads * _UNDERFLOW * (1 + factor)
    # Whether an intermediate sum overflows depends on the order, so no bound is given near overflow.
    largest = magnitude * length[..., None].clamp_min(LARGEST * math.sqrt(dim))
    return difference.masked_fill(~(largest < _FAR_FROM_OVERFLOW), torch.inf)
