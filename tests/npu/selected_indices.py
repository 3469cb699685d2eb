"""Indices in the indexer's form, and a watch for tensors that are read.

A row lists as many keys as it sees, at most topk, ascending.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def causal_indices(batch: int, rows: int, keys: int, topk: int, seed: int = 0) -> Tensor:
    """Return ``[batch, rows, topk]`` int32: row ``t`` sees the keys up to ``t + keys - rows``."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, rows, keys, generator=generator)
    position = torch.arange(keys)
    hidden = position > torch.arange(rows)[:, None] + keys - rows
    chosen = order.masked_fill(hidden, -1).topk(min(topk, keys), dim=-1)
    ascending = chosen.indices.masked_fill(chosen.values < 0, keys).sort(dim=-1).values
    return torch.where(ascending == keys, -1, ascending).int()


def packed_indices(lengths: tuple[int, ...], topk: int) -> Tensor:
    """Return ``[sum of lengths, topk]`` int32: causal rows within concatenated sequences."""
    parts, offset = [], 0
    for length in lengths:
        local = causal_indices(1, length, length, topk, seed=offset)[0]
        local = torch.nn.functional.pad(local, (0, topk - local.shape[1]), value=-1)
        parts.append(torch.where(local < 0, local, local + offset))
        offset += length
    return torch.cat(parts)


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list that gets the tensors whose contents are brought to the host from now on."""
    seen: list[Tensor] = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: seen.append(self) or original(self))
    return seen
