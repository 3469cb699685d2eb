"""Parts shared by the CPU kernels behind torch_npu's operators: sequences, layouts, documented limits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

WIDTHS = range(1024, 8193, 1024)


class Call(NamedTuple):
    """A call that reached an operator."""

    name: str
    layout: str
    queries: tuple[int, ...]
    """Number of rows of each sequence."""


calls: list[Call] = []


class Sequence(NamedTuple):
    """Rows and keys of one sequence, as slices of the tokens of the whole batch."""

    rows: slice
    keys: slice

    @property
    def visible(self) -> Tensor:
        """Bool mask ``[rows, keys]``, causal from the lower right corner."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        return torch.ones(rows, keys).tril(keys - rows).bool()


def sequences(
    name: str, layout: str, query: Tensor, key: Tensor, query_ends: Any, key_ends: Any
) -> list[Sequence]:
    dims = {"BSND": 4, "TND": 3}[layout]
    assert query.dim() == key.dim() == dims, f"{name}: {layout} has {dims} axes"
    ends = []
    for tensor, given_ends in ((query, query_ends), (key, key_ends)):
        if layout == "BSND":
            batch, length = tensor.shape[:2]
            assert given_ends is None or list(given_ends) == [length] * batch, f"{name}: BSND takes lengths"
            ends.append([length * (b + 1) for b in range(batch)])
        else:
            assert given_ends is not None, f"{name}: TND needs prefix sums"
            values = given_ends.tolist() if isinstance(given_ends, Tensor) else list(given_ends)
            assert values[0] > 0, f"{name}: a leading zero: {values}"
            assert values == sorted(values), f"{name}: {values}"
            assert values[-1] == tensor.shape[0], f"{name}: {values} does not end at {tensor.shape[0]}"
            ends.append(values)
    slices = [[slice(a, z) for a, z in zip([0, *one[:-1]], one, strict=True)] for one in ends]
    sequences_of_call = [Sequence(rows, keys) for rows, keys in zip(*slices, strict=True)]
    calls.append(Call(name, layout, tuple(s.rows.stop - s.rows.start for s in sequences_of_call)))
    return sequences_of_call


def require(name: str, tensors: list[Tensor | None], **conditions: bool) -> None:
    present = [tensor for tensor in tensors if tensor is not None]
    assert all(tensor.is_contiguous() for tensor in present), f"{name}: not contiguous"
    assert len({tensor.dtype for tensor in present}) == 1, f"{name}: {[tensor.dtype for tensor in present]}"
    assert present[0].dtype in (torch.bfloat16, torch.float16), f"{name}: {present[0].dtype}"
    for what, holds in conditions.items():
        assert holds, f"{name}: {what}"


def int32(name: str, *tensors: Tensor | None) -> None:
    assert all(tensor is None or tensor.dtype == torch.int32 for tensor in tensors), f"{name}: int32"


def tokens(tensor: Tensor) -> Tensor:
    """Convert BSND or TND to ``[tokens, heads, dim]`` in fp32."""
    return (tensor.flatten(0, 1) if tensor.dim() == 4 else tensor).float()


def rows(tensor: Tensor, layout: str) -> Tensor:
    """Convert ``[batch, length, x]`` or ``[tokens, x]`` to ``[tokens, x]``."""
    return tensor.flatten(0, 1) if layout == "BSND" else tensor


def statistics(tensor: Tensor, layout: str, query: Tensor, key: Tensor) -> Tensor:
    """Convert softmax statistics of either layout to ``[tokens, heads, 1]``.

    The layouts are ``[batch, kv_heads, length, group]`` and ``[kv_heads, tokens, group]``; ``query`` and
    ``key`` give the number of heads.
    """
    *batch, length, heads, _ = query.shape
    expected = (*batch, key.shape[-2], length, heads // key.shape[-2])
    assert tensor.is_contiguous(), "statistics: not contiguous"
    assert (tensor.shape, tensor.dtype) == (expected, torch.float32), (
        f"statistics: {tensor.shape}, {expected}"
    )
    by_token = tensor.permute(0, 2, 1, 3).flatten(0, 1) if layout == "BSND" else tensor.permute(1, 0, 2)
    return by_token.flatten(1)[..., None]


def selected(name: str, indices: Tensor, sequence: Sequence) -> Tensor:
    """Return ``[rows, keys]`` bool: each row's first ``min(topk, visible)`` entries, sequence-local."""
    visible = sequence.visible
    mask = torch.zeros_like(visible)
    for row, seen in enumerate(visible.sum(-1).tolist()):
        taken = indices[sequence.rows.start + row, : min(indices.shape[1], seen)].long()
        within = ((taken >= 0) & (taken < seen)).all()
        assert within, f"{name}: row {row} sees {seen} keys: {taken}"
        mask[row, taken] = True
    return mask


def products(query: Tensor, key: Tensor) -> Tensor:
    """Multiply ``[rows, heads, dim]`` by ``[keys, dim]``; return ``[rows, heads, keys]``."""
    return torch.einsum("rhd,kd->rhk", query, key)


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Return scores ``[rows, keys]``, computed 64 rows at a time to bound memory."""
    parts = zip(query.split(64), weights.split(64), strict=True)
    return torch.cat([torch.einsum("rhk,rh->rk", products(q, key).relu_(), w) for q, w in parts])


def index_gradients(
    grad: Tensor, query: Tensor, key: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the index scores; ``grad`` is ``[rows, keys]``, zero where not selected."""
    product = products(query, key)
    grad_product = grad[:, None] * weights[..., None] * (product > 0)
    return (
        torch.einsum("rhk,kd->rhd", grad_product, key),
        torch.einsum("rhk,rhd->kd", grad_product, query),
        torch.einsum("rhk,rk->rh", product.relu(), grad),
    )


def check_attention(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    indices: Tensor,
    modes: tuple[int, int],
) -> None:
    assert query_rope is not None
    assert key_rope is not None
    assert value is not None
    require(
        name,
        [query, key, value, query_rope, key_rope],
        heads=query.shape[-2] in (1, 2, 4, 8, 16, 32, 64, 128) and key.shape[-2] == 1,
        dims=query.shape[-1] == key.shape[-1] == value.shape[-1] == 512,
        rope=query_rope.shape[-1] == key_rope.shape[-1] == 64,
        modes=modes == (2, 3),
        indices=indices.is_contiguous() and indices.shape == (*query.shape[:-2], 1, indices.shape[-1]),
        topk=indices.shape[-1] in WIDTHS,
    )


def check_indexer(
    name: str,
    main: Tensor,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    weight_dtypes: tuple[torch.dtype, ...],
) -> None:
    require(
        name,
        [main, query, key],
        heads=query.shape[-2] in (8, 16, 32, 64) and key.shape[-2] == 1,
        dims=query.shape[-1] == key.shape[-1] == 128,
        weights=weights.dtype in weight_dtypes and weights.shape == query.shape[:-1],
        contiguous=weights.is_contiguous(),
    )


def with_rope(tensor: Tensor, rope: Tensor | None) -> Tensor:
    assert rope is not None
    return torch.cat([tokens(tensor), tokens(rope)], dim=-1)


def by_layout(by_token: Tensor, layout: str, batch: int) -> Tensor:
    """Convert ``[tokens, heads]`` to ``[batch, 1, length, heads]`` or ``[1, tokens, heads]``."""
    return by_token.unflatten(0, (batch, -1))[:, None] if layout == "BSND" else by_token[None]
