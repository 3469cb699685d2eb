"""Random inputs of the operators, including empty, packed and tied rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BACKENDS = ("reference", "chunked", "cpu")
DTYPES = (torch.float32, torch.bfloat16)


class IndexerInputs(NamedTuple):
    query: Tensor
    key: Tensor
    weights: Tensor


def indexer_inputs(
    batch: int = 2,
    rows: int = 37,
    keys: int | None = None,
    heads: int = 4,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> IndexerInputs:
    generator = torch.Generator().manual_seed(seed)
    keys = rows if keys is None else keys

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return IndexerInputs(
        normal(batch, rows, heads, dim), normal(batch, keys, dim), normal(batch, rows, heads) / heads
    )


def tied_inputs(batch: int = 2, rows: int = 40, heads: int = 3, dim: int = 8, seed: int = 0) -> IndexerInputs:
    """Return small integers: scores are exact in fp32, and most rows have ties, many between zeros of both
    signs.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    return IndexerInputs(
        integers(batch, rows, heads, dim), integers(batch, rows, dim), integers(batch, rows, heads)
    )


def packed_ranges(*lengths: int) -> tuple[Tensor, Tensor]:
    """Return ``starts, ends`` of concatenated sequences, causal within each sequence."""
    starts, ends, offset = [], [], 0
    for length in lengths:
        starts += [offset] * length
        ends += range(offset + 1, offset + length + 1)
        offset += length
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)


def random_indices(
    batch: int, rows: int, keys: int, topk: int, seed: int = 0, empty_rows: tuple[int, ...] = ()
) -> Tensor:
    """Return rows with 1 to ``topk`` entries in random order, -1 at the tail, and empty rows."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, rows, keys, generator=generator).argsort(-1)[..., :topk].int()
    counts = torch.randint(1, topk + 1, (batch, rows, 1), generator=generator)
    counts[:, list(empty_rows)] = 0
    return torch.where(torch.arange(topk) < counts, order, -1).int()


def drifting_indices(
    batch: int, rows: int, keys: int, topk: int, seed: int = 0, drift: float = 0.1
) -> Tensor:
    """Return ascending causal selections, -1 at the tail, that overlap strongly between neighbouring rows.

    The last row sees all keys; the first rows see fewer than ``topk``.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, 1, keys, generator=generator) + drift * torch.rand(
        batch, rows, keys, generator=generator
    )
    seen = torch.linspace(topk // 2, keys, rows).long()
    position = torch.arange(keys)
    scores = scores.masked_fill(position >= seen[:, None], -torch.inf)
    best, indices = scores.topk(topk)
    indices = torch.where(best > -torch.inf, indices, keys).sort(-1).values
    return torch.where(indices < keys, indices, -1).int()
