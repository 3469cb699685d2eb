"""DeepSeek's FP8 scores written from its kernels ``act_quant`` and ``fp8_index``, on torch's own casts.

Where they leave the order of sums open, that of the operator's README: products exact and rounded once, heads
added in halves.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def act_quant(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Rows in ``float8_e4m3fn``, and factors: ``x`` is ``[..., dim]``."""
    inverse = np.float32(1 / 448.0)
    amax = np.maximum(x.float().abs().amax(-1).numpy(), np.float32(1e-4))
    factors = amax * inverse
    if ue8m0:
        bits = factors.view(np.uint32)
        exponent = ((bits >> 23) & 0xFF).astype(np.int32) - 127 + ((bits & ((1 << 23) - 1)) != 0)
        with np.errstate(over="ignore"):  # of what is not finite
            factors = np.where(np.isnan(factors), factors, np.ldexp(np.float32(1), exponent))
    scale = torch.from_numpy(np.ascontiguousarray(factors, dtype=np.float32))
    return (x.float() / scale[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def fp8_index(q8: Tensor, weights: Tensor, k8: Tensor, k_scale: Tensor, use_relu: bool = True) -> Tensor:
    """Scores ``[b, s, t]`` of ``[b, s, h, d]``, ``[b, s, h]``, ``[b, t, d]`` and ``[b, t]``."""
    logits = torch.einsum("bshd,btd->bhst", q8.double(), k8.double()).float()
    logits = logits.clamp_min(0) if use_relu else logits
    heads = [logits[:, head] * weights[:, :, head, None] for head in range(weights.shape[2])]
    while len(heads) > 1:
        half = math.ceil(len(heads) / 2)
        heads = [a + b for a, b in zip(heads, heads[half:], strict=False)] + heads[len(heads) - half : half]
    return heads[0] * k_scale[:, None]


def scores(query: Tensor, key: Tensor, weights: Tensor, ue8m0: bool, use_relu: bool = True) -> Tensor:
    """Scores of all queries with all keys, as ``Indexer.forward`` forms them, unmasked."""
    q8, q_scale = act_quant(query, ue8m0)
    k8, k_scale = act_quant(key, ue8m0)
    return fp8_index(q8, weights.float() * q_scale, k8, k_scale, use_relu)


def selection(inputs, topk, starts, ends, ue8m0, use_relu=True) -> Tensor:
    """The best keys of each row one by one: numbers, then NaN, each falling and from the lowest position."""
    found = scores(*inputs, ue8m0, use_relu)
    chosen = torch.full((*found.shape[:2], min(topk, found.shape[2])), -1, dtype=torch.int32)
    for b, row in np.ndindex(*found.shape[:2]):
        seen = range(max(int(starts[row]), 0), min(int(ends[row]), found.shape[2]))
        of_row = found[b, row].tolist()
        best = sorted(
            seen, key=lambda s: (math.isnan(of_row[s]), -of_row[s] if of_row[s] == of_row[s] else 0, s)
        )
        kept = sorted(best[:topk])
        chosen[b, row, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
    return chosen


def exact_product(a: Tensor, b: Tensor) -> float:
    """A scalar product of two rows in fractions, rounded once, to fp32."""
    total = sum((Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)), Fraction(0))
    # Rounding to fp64 first would be rounding twice, were it not exact.
    assert Fraction(float(total)) == total
    return float(np.float32(float(total)))
