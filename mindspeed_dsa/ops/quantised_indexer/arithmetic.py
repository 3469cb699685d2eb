"""Arithmetic of the inference engines' FP8 index scores: rows in e4m3 with a factor each, sums in order.

The formulas are those of DeepSeek's ``act_quant`` and ``fp8_index`` (DeepSeek-V3.2-Exp,
``inference/kernel.py``), with the order of sums that they leave open. Plain PyTorch: the same bits on every
device that keeps IEEE 754.
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
"""Largest magnitude that a row is taken to have at least."""
MOST_DIMENSIONS = 1 << 17
"""Up to here a scalar product of e4m3 numbers is exact in fp64.

Numbers of e4m3 are multiples of 2^-9 below 2^9, their products of 2^-18 below 2^17.7, and fp64 has 53 bits.
"""
# Exponent of the smallest normal number of e4m3, whose significands have four bits: below it numbers are
# equally spaced.
_SMALLEST_NORMAL, _STEPS = 2.0**-6, 8
_EXPONENT, _FRACTION, _FRACTION_BITS = 0x7F800000, 0x007FFFFF, 23
# Products in fp64 that are held at once.
_PRODUCTS = 1 << 22
# Half a step of fp32, relative, and what a bound that is itself rounded wants on top.
_ROUNDING, _MARGIN = 2.0**-24, 1.1
# Above what is lost where a product or a sum falls below the normal numbers of fp32, in 2^8 of them.
_UNDERFLOW = 2.0**-118
_FAR_FROM_OVERFLOW = 2.0**126


@dataclass(frozen=True)
class QuantisedCall(IndexerCall):
    """Arguments of the index scores, whose backends quantise query and key.

    Attributes:
        powers_of_two: factors are rounded up to such (``ue8m0``).
    """

    powers_of_two: bool = True


def quantise(rows: Tensor, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return rows in e4m3, and their factors: ``values * factors`` is near to what was given.

    The factor of a row with infinities or NaN is NaN, whatever tensor cores make of such, and so are its
    scores. In the engines they are too, where zero meets an infinite factor.

    Args:
        rows: ``[..., dim]``, floating point.
        powers_of_two: factors are rounded up to such.

    Returns:
        fp32 ``[..., dim]`` whose numbers are e4m3's, and fp32 ``[...]``.
    """
    rows = rows.detach().float()
    # DeepSeek's kernel multiplies by 1/448 in fp32; rounded up to a power of two the quotient gives the same.
    factors = rows.abs().amax(dim=-1).clamp_min_(SMALLEST_AMAX).mul_(1 / LARGEST)
    wrong = ~factors.isfinite()
    if powers_of_two:
        factors = _power_above(factors)
    factors = factors.masked_fill_(wrong, torch.nan)
    return _in_e4m3((rows / factors[..., None]).clamp_(-LARGEST, LARGEST)), factors


def _power_above(numbers: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each positive normal number."""
    bits = numbers.view(torch.int32) + _FRACTION
    return (bits & _EXPONENT).view(torch.float32)


def _in_e4m3(numbers: Tensor) -> Tensor:
    """Round to e4m3, to nearest even, what lies in its range; in fp32.

    On CPUs torch casts to ``float8_e4m3fn`` as fast, and back at a sixth of that speed.
    """
    bits = numbers.view(torch.int32)
    step = (bits & _EXPONENT).view(torch.float32).clamp_min_(_SMALLEST_NORMAL).div_(_STEPS)
    return (numbers / step).round_().mul_(step)


def exact_scores(query: Tensor, key: Tensor, weights: Tensor, factors: Tensor, use_relu: bool) -> Tensor:
    """Return scores of rows that are quantised, ``[..., rows, keys]`` fp32.

    A head's scalar product is exact, in fp64, and rounded to fp32 once; ReLU; times the weight, rounded. Of
    ``n`` heads that are left the first ``n // 2`` get one of the last added each, head ``i`` that ``n // 2``
    (rounded up) behind it, until one is left. Its sum is multiplied by the key's factor.

    Args:
        query: ``[..., rows, heads, dim]`` fp32, of e4m3's numbers.
        key: ``[..., keys, dim]`` fp32, likewise.
        weights: ``[..., rows, heads]`` fp32, times the factors of the query.
        factors: ``[..., keys]`` fp32, of the keys.
        use_relu: whether the product of each head is clamped at zero.
    """
    *batch, rows, heads, dim = query.shape
    keys = key.shape[-2]
    scores = query.new_empty(*batch, rows, keys)
    flat = query.double().reshape(*batch, rows * heads, dim)
    width = max(1, _PRODUCTS // max(1, flat.shape[:-1].numel()))
    for first in range(0, keys, width):
        part = slice(first, min(first + width, keys))
        products = torch.matmul(flat, key[..., part, :].double().mT).float()
        products = products.view(*batch, rows, heads, part.stop - first)
        if use_relu:
            products.relu_()
        products.mul_(weights[..., None])
        scores[..., part] = _sum_of_heads(products)
    return scores.mul_(factors[..., None, :])


def _sum_of_heads(products: Tensor) -> Tensor:
    """Return the sum over heads, ``[..., heads, keys]`` -> ``[..., keys]``; overwrites what it is given."""
    left = products.shape[-2]
    while left > 1:
        kept = (left + 1) // 2
        products[..., : left - kept, :].add_(products[..., kept:left, :])
        left = kept
    return products[..., 0, :]


def longest_key(key: Tensor, factors: Tensor) -> Tensor:
    """Return the length of each sequence's longest key, ``[batch]``, of those that are numbers."""
    return (torch.linalg.vector_norm(key, dim=-1) * factors).nan_to_num(0.0, 0.0, 0.0).amax(dim=-1)


def largest_difference(query: Tensor, weights: Tensor, length: Tensor, factor: float) -> Tensor:
    """Return how far other fp32 sums of a row's scores may lie from :func:`exact_scores`, ``[..., rows]``.

    In any order, of exact products, and rounded at each step, a sum of ``n`` numbers is off by at most
    ``n 2^-24`` times the sum of their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms,
    section 4.2). That of a scalar product is at most the product of both lengths. Rounded are ``dim``
    products, ``heads`` of them again with their weights, and the key's factor, on both sides.

    Args:
        query: ``[..., rows, heads, dim]``, as of :func:`exact_scores`.
        weights: ``[..., rows, heads]``, likewise.
        length: ``[...]``, of the longest key.
        factor: the largest of the keys.

    Returns:
        fp32; infinite where there is none, as for rows that are not finite, or whose sums may not be.
    """
    heads, dim = query.shape[-2:]
    rounded = _MARGIN * _ROUNDING * (dim + 2 * heads + 8)
    magnitude = (weights.abs() * torch.linalg.vector_norm(query, dim=-1)).sum(dim=-1)
    difference = magnitude * (rounded * length[..., None]) + heads * _UNDERFLOW * (1 + factor)
    # Whether a sum overflows on its way depends on its order.
    largest = magnitude * length[..., None].clamp_min(LARGEST * math.sqrt(dim))
    return difference.masked_fill(~(largest < _FAR_FROM_OVERFLOW), torch.inf)
