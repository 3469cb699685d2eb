"""Split query tokens into chunks of bounded memory and gather their selected keys, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_dsa.ops.checks import names_key
from mindspeed_dsa.ops.precision import wide

# Bytes that the intermediate tensors of a chunk may occupy.
_CHUNK_BYTES = 256 << 20


class Chunk(NamedTuple):
    """Some query rows of one sequence, with the keys that these rows selected."""

    batch: int
    rows: slice
    indices: Tensor
    """``[n, topk]`` int64; 0 where ``invalid``."""
    invalid: Tensor
    """``[n, topk]`` bool."""
    keys: Tensor
    """``[n, topk, dim]``, zero where ``invalid``."""


def row_chunks(key: Tensor, topk_indices: Tensor, scratch_per_entry: int) -> Iterator[Chunk]:
    """Yield chunks of query rows with their gathered keys, within a fixed memory budget.

    Args:
        key: ``[batch, key_length, dim]``.
        topk_indices: ``[batch, query_length, topk]``.
        scratch_per_entry: count of numbers that the caller allocates per selected entry, part of the budget.
    """
    batch, length, topk = topk_indices.shape
    dim, dtype = key.shape[2], wide(key.dtype)
    rows = max(1, _CHUNK_BYTES // max(1, topk * (2 * dim + scratch_per_entry) * dtype.itemsize))
    for b in range(batch):
        for first in range(0, length, rows):
            part = slice(first, first + rows)
            indices = topk_indices[b, part].long()  # [n, topk]
            invalid = ~names_key(indices, key.shape[1])
            indices = indices.masked_fill(invalid, 0)
            # key[b]: [key_length, dim] -> [n * topk, dim] -> [n, topk, dim]
            keys = key[b].index_select(0, indices.flatten()).view(*indices.shape, dim).to(dtype)
            yield Chunk(b, part, indices, invalid, keys.masked_fill_(invalid[..., None], 0))


def scratch_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``a @ b`` into a buffer that the caller may overwrite.

    Shapes: ``[..., n, k]`` and ``[..., k, m]`` give ``[..., n, m]``.
    """
    # Selective checkpointing saves the outputs of `mm` and `bmm` and refuses a backward if they were changed
    # in place. It saves nothing of products with `out=`.
    return torch.matmul(a, b, out=a.new_empty(*a.shape[:-1], b.shape[-1]))  # [..., n, m]
