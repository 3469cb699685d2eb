"""The operators in fp64 with dense masks, the expected values for every backend.

They are written from the formulas, unlike the references: with ``length x length`` masks, and without
gathering. They take the indices that the operator under test has selected.
"""

from __future__ import annotations

import torch
from torch import Tensor


def selected_mask(topk_indices: Tensor, key_length: int) -> Tensor:
    """Return a bool mask ``[batch, rows, keys]`` of the selected keys."""
    # One extra column collects the -1 entries.
    mask = torch.zeros(*topk_indices.shape[:2], key_length + 1, dtype=torch.bool)
    at = topk_indices.long()
    return mask.scatter(-1, torch.where(at < 0, key_length, at), True)[..., :key_length]


def index_scores(query: Tensor, key: Tensor, weights: Tensor, use_relu: bool = True) -> Tensor:
    products = query.double() @ key.double()[:, None].transpose(-1, -2)
    products = products.clamp_min(0) if use_relu else products
    return (products * weights.double()[..., None]).sum(2)


def attention(query: Tensor, key_value: Tensor, mask: Tensor, scale: float, value_dim: int):
    """Return ``out``, ``lse`` and the probabilities ``[batch, rows, heads, keys]``."""
    scores = scale * (query.double() @ key_value.double()[:, None].transpose(-1, -2))
    exponentials = scores.exp() * mask[:, :, None]
    total = exponentials.sum(-1, keepdim=True)
    probabilities = exponentials / torch.where(total == 0, 1.0, total)
    return probabilities @ key_value.double()[:, None, :, :value_dim], total[..., 0].log(), probabilities


def divergence(scores: Tensor, probabilities: Tensor, mask: Tensor) -> Tensor:
    """Return the divergence per row, ``[batch, rows]``, from per-head ``probabilities``."""
    target = probabilities.detach().sum(2)
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-300)
    exponentials = scores.exp() * mask
    predicted = exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1e-300)
    ratio = torch.where(mask, target, 1.0).log() - torch.where(mask, predicted, 1.0).log()
    return (torch.where(mask & (target > 0), ratio, 0.0) * target).sum(-1)


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return the largest deviation relative to the largest expected magnitude."""
    difference = (value.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-300))


def cosine_distance(value: Tensor, expected: Tensor) -> float:
    a, b = value.double().flatten(), expected.double().flatten()
    return float(1 - torch.dot(a, b) / (a.norm() * b.norm()))


def norms_differ(value: Tensor, expected: Tensor) -> float:
    """Return the relative difference of the norms, which cosine distances do not see."""
    return abs(float(value.double().norm() / expected.double().norm().clamp_min(1e-300)) - 1)


def assert_close(value: Tensor, expected: Tensor, *, backward: bool = False) -> None:
    """Check the library's bounds: 1e-5 of the largest value in fp32; in bf16 cosine distance 1e-5, backward
    1e-4, and norms to 2 %.
    """
    assert value.shape == expected.shape
    assert torch.isfinite(value).all()
    if value.dtype == torch.bfloat16:
        assert cosine_distance(value, expected) < (1e-4 if backward else 1e-5)
        assert norms_differ(value, expected) < 0.02
    else:
        assert relative_error(value, expected) < (1e-5 if value.dtype == torch.float32 else 1e-11)
