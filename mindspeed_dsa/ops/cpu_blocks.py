"""Shared by the CPU backends: batched fp32 products and the cutting of rows into cache-sized blocks.

Two measured facts shape the CPU backends:

* A product with few rows (heads x head size by selected keys) runs at the speed of a large matmul as
  long as the gathered keys are still in cache. Blocks are therefore a few megabytes, not as large as
  memory allows, and scratch is allocated once and reused, because fresh pages cost as much as the work.
* ``torch.bmm`` in fp32 goes to the BLAS that PyTorch was built with; on x86 processors that this BLAS
  does not know it uses half of the vector width. oneDNN, which PyTorch also carries, does not.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu_threads import share_out

Result = TypeVar("Result")

# Bytes of gathered keys per thread that a block may hold.
_BLOCK_BYTES_PER_THREAD = 4 << 20
# Below this much work per product, or above this many threads, one batched call is faster than a loop.
_LOOP_MIN_FLOPS = 4_000_000
_LOOP_MAX_THREADS = 4
# Widths are rounded up to this, so that the number of distinct product shapes stays small.
_WIDTH_STEP = 64


def _onednn_linear() -> Any:
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.is_available():
        return None
    namespace = torch.ops.mkldnn
    return namespace._linear_pointwise.default if hasattr(namespace, "_linear_pointwise") else None


_LINEAR = _onednn_linear()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Products and sums of a CPU backend are in fp32, or in fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_rows(bytes_per_row: int) -> int:
    """Query rows per block: as many as keep the block in cache, and at least one per thread."""
    threads = torch.get_num_threads()
    return max(threads, threads * _BLOCK_BYTES_PER_THREAD // max(bytes_per_row, 1))


def linear(x: Tensor, weight: Tensor, relu: bool = False) -> Tensor:
    """``x @ weight.T``, optionally clamped at zero: ``[m, k]``, ``[n, k]`` -> ``[m, n]``."""
    if _onednn_takes(x, weight):
        product: Tensor = _LINEAR(x, weight, None, "relu" if relu else "none", [], "")
        return product
    out = torch.mm(x, weight.t())
    return out.relu_() if relu else out


def batched_matmul(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """``out.copy_(torch.bmm(a, b))``: ``[n, m, k]``, ``[n, k, p]`` -> ``[n, m, p]``."""
    if not _loops(a, b):
        return torch.bmm(a, b, out=out)
    b = b.transpose(1, 2)
    if a.shape[1] < b.shape[1] and b.is_contiguous():
        # The second operand is packed on every call, so the smaller one takes that place.
        for left, right, target in zip(a, b, out.transpose(1, 2), strict=True):
            target.copy_(_LINEAR(right, left, None, "none", [], ""))
    else:
        for left, right, target in zip(a, b, out, strict=True):
            target.copy_(_LINEAR(left, right, None, "none", [], ""))
    return out


def _loops(a: Tensor, b: Tensor) -> bool:
    """Whether one oneDNN call per product is faster than one batched call."""
    return (
        2 * a.shape[1] * a.shape[2] * b.shape[2] >= _LOOP_MIN_FLOPS
        and torch.get_num_threads() <= _LOOP_MAX_THREADS
        and _onednn_takes(a[0], b[0].t())
    )


def _onednn_takes(x: Tensor, weight: Tensor) -> bool:
    # For a weight with gaps between its rows oneDNN has only its unoptimised reference kernel.
    dense = weight.is_contiguous() or weight.t().is_contiguous()
    enabled = _LINEAR is not None and bool(torch.backends.mkldnn.enabled)
    return dense and enabled and x.dtype == torch.float32


class Scratch:
    """Buffers that live as long as one call and are reused from block to block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """An uninitialised contiguous tensor; overlaps what the same name returned before."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype)
        return buffer[:size].view(shape)


class Block(NamedTuple):
    """A few query rows of one sequence with the keys they selected."""

    batch: int
    rows: slice
    indices: Tensor
    """``[n, width]`` int64; 0 where ``invalid``."""
    invalid: Tensor | None
    """``[n, width]`` bool, or None when every entry is valid."""
    keys: Tensor
    """``[n, width, dim]``, zero where ``invalid``; reused by the next block."""


class _Cut(NamedTuple):
    batch: int
    rows: slice
    width: int
    complete: bool


def over_blocks(
    key: Tensor,
    topk_indices: Tensor,
    scratch_per_entry: int,
    work: Callable[[Iterator[Block], Scratch], Result],
) -> list[Result]:
    """Cut the rows of ``topk_indices`` into blocks, gather the keys of each, and hand them to ``work``.

    ``work`` is called once in every thread, with some of the blocks and with scratch of its own. Which
    blocks depends on the shapes and the number of threads alone.

    Args:
        key: ``[batch, key_length, dim]``.
        topk_indices: ``[batch, query_length, topk]`` int32, -1 where there is no key.
        scratch_per_entry: numbers that the caller holds per selected entry beside the key itself.
        work: takes its blocks in order. A block's ``width`` is the least that holds every valid entry of the
            block, rounded up, so that rows with few visible keys cost little.

    Returns:
        What ``work`` returned in each thread, in a fixed order.
    """
    batch, query_length, topk = topk_indices.shape
    dim, dtype = key.shape[2], compute_dtype(key.dtype)
    rows = min(block_rows(topk * (dim + scratch_per_entry) * dtype.itemsize), max(query_length, 1))
    # The latent keys are small; in the dtype of the products they are gathered as is.
    keys = [one.detach().to(dtype).contiguous() for one in key]
    slot = torch.arange(1, topk + 1, dtype=torch.int32)
    cuts = []
    for b in range(batch):
        valid = topk_indices[b] >= 0
        counts, lasts = valid.sum(-1).tolist(), (valid * slot).amax(-1).tolist()
        for first in range(0, query_length, rows):
            part = slice(first, min(first + rows, query_length))
            width = min(topk, -(-max(*lasts[part], 1) // _WIDTH_STEP) * _WIDTH_STEP)
            cuts.append(_Cut(b, part, width, min(counts[part]) >= width))

    def of_thread(share: Sequence[_Cut]) -> Result:
        scratch = Scratch(dtype)
        return work((_gather(cut, keys[cut.batch], topk_indices, scratch) for cut in share), scratch)

    return share_out(cuts, of_thread)


def _gather(cut: _Cut, key: Tensor, topk_indices: Tensor, scratch: Scratch) -> Block:
    indices = topk_indices[cut.batch, cut.rows, : cut.width]
    invalid = None
    if not cut.complete:
        invalid = indices < 0
        indices = indices.clamp_min(0)
    # Adding rows by 64-bit indices is three times as fast as by 32-bit ones.
    indices = indices.long()
    gathered = scratch("keys", *indices.shape, key.shape[1])
    torch.index_select(key, 0, indices.reshape(-1), out=gathered.view(-1, key.shape[1]))
    if invalid is not None:
        gathered.masked_fill_(invalid[..., None], 0)
    return Block(cut.batch, cut.rows, indices, invalid, gathered)


def scatter_add_rows(total: Tensor, block: Block, a: Tensor, b: Tensor, scratch: Scratch) -> None:
    """Add ``a[i] @ b[i]``, one row per selected key, to the keys' rows of ``total``, in a fixed order.

    Args:
        total: ``[key_length, dim]``.
        block: whose ``indices`` say which rows.
        a: ``[n, width, k]``; zero in the rows of invalid entries.
        b: ``[n, k, dim]``.
        scratch: where the products may lie.
    """
    if _loops(a, b):
        for indices, left, right in zip(block.indices, a, b.transpose(1, 2), strict=True):
            total.index_add_(0, indices, _LINEAR(left, right, None, "none", [], ""))
    else:
        tiles = torch.bmm(a, b, out=scratch("tiles", a.shape[0], a.shape[1], b.shape[2]))
        total.index_add_(0, block.indices.flatten(), tiles.flatten(0, 1))


def sum_in_order(totals: Sequence[Tensor]) -> Tensor:
    """Sum of what the threads added up each, in a fixed order; the first of them is overwritten."""
    for other in totals[1:]:
        totals[0].add_(other)
    return totals[0]
