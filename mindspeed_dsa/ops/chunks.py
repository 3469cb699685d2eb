"""Chunks of rows of bounded size with the keys that they selected, in plain PyTorch on any device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops.checks import names_key
from mindspeed_dsa.ops.precision import wide

# Bytes that the intermediate tensors of a chunk may take.
_CHUNK_BYTES = 256 << 20


class Chunk(NamedTuple):
    """Rows of one sequence with the keys they selected."""

    batch: int
    rows: slice
    indices: Tensor
    """``[n, topk]`` int64; 0 where ``invalid``."""
    invalid: Tensor
    """``[n, topk]`` bool."""
    keys: Tensor
    """``[n, topk, dim]``, zero where ``invalid``."""


def row_chunks(key: Tensor, topk_indices: Tensor, scratch_per_entry: int) -> Iterator[Chunk]:
    """Cut the rows into chunks and gather their keys; the caller holds ``scratch_per_entry`` numbers each."""
    batch, length, topk = topk_indices.shape
    dim, dtype = key.shape[2], wide(key.dtype)
    rows = max(1, _CHUNK_BYTES // max(1, topk * (2 * dim + scratch_per_entry) * dtype.itemsize))
    for b in range(batch):
        for first in range(0, length, rows):
            part = slice(first, first + rows)
            indices = topk_indices[b, part].long()
            invalid = ~names_key(indices, key.shape[1])
            indices = indices.masked_fill(invalid, 0)
            keys = key[b].index_select(0, indices.flatten()).view(*indices.shape, dim).to(dtype)
            yield Chunk(b, part, indices, invalid, keys.masked_fill_(invalid[..., None], 0))


def scratch_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in memory that the caller may overwrite: ``[..., n, k]``, ``[..., k, m]`` -> ``[..., n, m]``.

    Selective checkpointing keeps what ``mm`` and ``bmm`` return, and refuses a backward if it was changed. Of
    products with ``out=`` it keeps nothing.
    """
    return torch.matmul(a, b, out=a.new_empty(*a.shape[:-1], b.shape[-1]))
