"""Causal attention in three parts against attention in one piece, for every backend and device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops.dense_attention import (
    attention_of_parts,
    attention_of_parts_backward,
    dense_attention,
    dense_attention_backward,
)

SCALE = 0.3


class Shape(NamedTuple):
    batch: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int


SHAPES = (
    Shape(2, 24, 4, 4, 16, 16),
    Shape(1, 40, 6, 2, 24, 16),  # grouped heads, and latent attention's longer queries
    Shape(2, 18, 3, 1, 8, 20),  # one key head, longer values
)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Bounds relative to the largest entry."""


def problem(
    dtype: torch.dtype, shape: Shape, device: str = "cpu"
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return query, key, value ``[batch, rows, heads, dim]``, views of sequence-first tensors, and the output
    gradient.
    """
    generator = torch.Generator().manual_seed(0)

    def states(heads: int, dim: int) -> Tensor:
        drawn = torch.randn(shape.rows, shape.batch, heads, dim, generator=generator, dtype=torch.float64)
        return drawn.to(device, dtype).transpose(0, 1)

    operands = states(shape.heads, shape.dim), states(shape.kv_heads, shape.dim)
    return (*operands, states(shape.kv_heads, shape.value_dim)), states(shape.heads, shape.value_dim)


def whole(query: Tensor, key: Tensor, value: Tensor, scale: float = SCALE) -> Tensor:
    """Return causal attention in one piece, differentiable, in fp64."""
    query, key, value = (one.double() for one in (query, key, value))
    group = query.shape[2] // key.shape[2]
    key, value = (one.repeat_interleave(group, dim=2) for one in (key, value))
    scores = scale * torch.einsum("bthd,bshd->bhts", query, key)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


def check(backend: str, dtype: torch.dtype, shape: Shape, device: str = "cpu") -> None:
    """Compare attention in three parts with attention in one piece, forward and backward."""
    (query, key, value), grad = problem(dtype, shape, device)
    leaves = [one.detach().double().requires_grad_() for one in (query, key, value)]
    expected = whole(*leaves)
    wanted = torch.autograd.grad(expected, leaves, grad.double())

    # Early queries see early keys causally. Late queries see all early keys, and late keys causally.
    half = shape.rows // 2
    early, late = slice(0, half), slice(half, None)
    parts = ((early, early, True), (late, early, False), (late, late, True))
    results = [
        dense_attention(query[:, rows], key[:, keys], value[:, keys], SCALE, causal=causal, backend=backend)
        for rows, keys, causal in parts
    ]
    (first, first_lse), (old, old_lse), (new, new_lse) = results
    assert first.dtype == query.dtype
    assert first_lse.dtype == torch.promote_types(dtype, torch.float32)
    late_lse = torch.logaddexp(old_lse, new_lse)
    late_out = (old_lse - late_lse).exp()[..., None] * old + (new_lse - late_lse).exp()[..., None] * new
    out, lse = torch.cat([first, late_out.to(dtype)], dim=1), torch.cat([first_lse, late_lse], dim=1)
    assert_close(out, expected, TOLERANCES[dtype], "out")

    gradients = [torch.zeros_like(one, dtype=torch.float64) for one in (query, key, value)]
    for rows, keys, causal in parts:
        added = dense_attention_backward(
            grad[:, rows],
            query[:, rows],
            key[:, keys],
            value[:, keys],
            out[:, rows],
            lse[:, rows],
            SCALE,
            causal=causal,
            backend=backend,
        )
        for total, one, where in zip(gradients, added, (rows, keys, keys), strict=True):
            total[:, where] += one
    for total, right, name in zip(gradients, wanted, ("query", "key", "value"), strict=True):
        assert_close(total, right, TOLERANCES[dtype], f"gradient of {name}")


def assert_close(found: Tensor, right: Tensor, tolerance: float, what: str) -> None:
    assert found.shape == right.shape, what
    error = (found.double() - right.double()).abs().max() / right.double().abs().max()
    assert error <= tolerance, f"{what}: {error}"


def check_parts(backend: str, dtype: torch.dtype, batch: int = 1) -> None:
    """Compare attention with separate rotary parts, on 40 tokens, with attention in one piece in fp64."""
    heads, plain, rope, value_dim = 6, 16, 8, 16
    (query, key, value), grad = problem(dtype, Shape(batch, 40, heads, heads, plain + rope, value_dim))
    parts = [*query.split([plain, rope], dim=-1), *key.split([plain, rope], dim=-1), value]
    parts[3] = parts[3][:, :, :1]
    leaves = [one.detach().double().requires_grad_() for one in parts]
    expected = whole(
        torch.cat(leaves[:2], dim=-1),
        torch.cat([leaves[2], leaves[3].expand(-1, -1, heads, -1)], dim=-1),
        leaves[4],
    )
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    out, statistics = attention_of_parts(*parts, SCALE, backend=backend)
    assert out.dtype == dtype
    assert_close(out, expected, TOLERANCES[dtype], "out")
    found = attention_of_parts_backward(grad, *parts, out, statistics, SCALE, backend=backend)
    names = ("query", "query_rope", "key", "key_rope", "value")
    for one, right, name in zip(found, wanted, names, strict=True):
        assert_close(one, right, TOLERANCES[dtype], f"gradient of {name}")
