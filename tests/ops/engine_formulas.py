"""DeepSeek's FP8 index scores, written from its kernels ``act_quant`` and ``fp8_index`` with torch's own
casts.

The kernels leave the order of sums open. Here it is the order in the operator's README: dot products are
exact and rounded once, and heads are summed in halves.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def act_quant(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Quantise rows of ``x`` ``[..., dim]``; return them in ``float8_e4m3fn``, and their scales."""
    inverse = np.float32(1 / 448.0)
    amax = np.maximum(x.float().abs().amax(-1).numpy(), np.float32(1e-4))
    factors = amax * inverse
    if ue8m0:
        bits = factors.view(np.uint32)
        exponent = ((bits >> 23) & 0xFF).astype(np.int32) - 127 + ((bits & ((1 << 23) - 1)) != 0)
        with np.errstate(over="ignore"):  # exponents of inf and NaN
            factors = np.where(np.isnan(factors), factors, np.ldexp(np.float32(1), exponent))
    scale = torch.from_numpy(np.ascontiguousarray(factors, dtype=np.float32))
    return (x.float() / scale[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def fp8_index(q8: Tensor, weights: Tensor, k8: Tensor, k_scale: Tensor, use_relu: bool = True) -> Tensor:
    """Return scores ``[b, s, t]`` of ``[b, s, h, d]``, ``[b, s, h]``, ``[b, t, d]`` and ``[b, t]``."""
    logits = torch.einsum("bshd,btd->bhst", q8.double(), k8.double()).float()
    logits = logits.clamp_min(0) if use_relu else logits
    heads = [logits[:, head] * weights[:, :, head, None] for head in range(weights.shape[2])]
    while len(heads) > 1:
        half = math.ceil(len(heads) / 2)
        heads = [a + b for a, b in zip(heads, heads[half:], strict=False)] + heads[len(heads) - half : half]
    return heads[0] * k_scale[:, None]


def scores(query: Tensor, key: Tensor, weights: Tensor, ue8m0: bool, use_relu: bool = True) -> Tensor:
    """Return unmasked scores of all queries and keys, as ``Indexer.forward`` computes them."""
    q8, q_scale = act_quant(query, ue8m0)
    k8, k_scale = act_quant(key, ue8m0)
    return fp8_index(q8, weights.float() * q_scale, k8, k_scale, use_relu)


def selection(inputs, topk, starts, ends, ue8m0, use_relu=True) -> Tensor:
    """Select the best keys row by row: numbers before NaN, then by falling score, then by rising position."""
    all_scores = scores(*inputs, ue8m0, use_relu)
    topk_indices = torch.full((*all_scores.shape[:2], min(topk, all_scores.shape[2])), -1, dtype=torch.int32)
    for b, row in np.ndindex(*all_scores.shape[:2]):
        seen = range(max(int(starts[row]), 0), min(int(ends[row]), all_scores.shape[2]))
        of_row = all_scores[b, row].tolist()
        best = sorted(
            seen, key=lambda s: (math.isnan(of_row[s]), -of_row[s] if of_row[s] == of_row[s] else 0, s)
        )
        kept = sorted(best[:topk])
        topk_indices[b, row, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
    return topk_indices


def exact_product(a: Tensor, b: Tensor) -> float:
    """Return the dot product of two rows, computed exactly and rounded once to fp32."""
    total = sum((Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)), Fraction(0))
    # An inexact fp64 value would be rounded twice on its way to fp32.
    assert Fraction(float(total)) == total
    return float(np.float32(float(total)))
