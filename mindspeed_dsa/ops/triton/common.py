"""Shared by the Triton backends: what can run at all, tile sizes, and gradients of gathered rows.

Tile sizes come from small tables, not from `triton.autotune`: ranks that tune for themselves may choose
different tiles, hence other orders of summation, and then select different keys for the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor

from mindspeed_dsa import log
from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.checks import names_key
from mindspeed_dsa.ops.triton.launch import DoesNotCompile, capability_of, load, on_grid, rehearsal

_log = log.get("ops")
LOG2E: float = math.log2(math.e)
# What the kernels are written in came with 3.3; on GPUs none before 3.4, torch 2.8's, was tried.
_OLDEST, _OLDEST_ON_GPU = Version("3.3"), Version("3.4")
# Compilers before it fail at a loop with a branch between products of warp groups.
_TAKES_BRANCHES = Version("3.7")
TAKES_BRANCHES: tl.constexpr = tl.constexpr(Version(triton.__version__) >= _TAKES_BRANCHES)
# The least compute capability, times ten, with bf16 products and asynchronous copies.
_LEAST_CAPABILITY = 80
# Blocks of a product have at least this many rows, columns and inner numbers.
MIN_BLOCK = 16
# Padded sizes of the two parts of a main key, together: a tile of keys and one of queries share the
# memory of a multiprocessor. 512 latent and up to 128 rotary numbers fit.
_MAX_PADDED_DIM = 640
# Bytes of scratch that a call may hold beside its results.
WORKSPACE_BYTES = 512 << 20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def is_key(index, key_length):
    """:func:`names_key` in a kernel. An entry that names none must not become an address."""
    return (index >= 0) & (index < key_length)


@triton.jit
def row_lengths_kernel(indices, lengths, key_length, topk, BLOCK: tl.constexpr):
    """One program per row: one past the last entry that is a key."""
    row = tl.program_id(0).to(tl.int64)
    longest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, topk, BLOCK):
        position = first + tl.arange(0, BLOCK)
        index = tl.load(indices + row * topk + position, mask=position < topk, other=-1)
        longest = tl.maximum(longest, tl.where(is_key(index, key_length), position + 1, 0))
    tl.store(lengths + row, tl.max(longest, axis=0))


@triton.jit(do_not_specialize=["first_entry", "first_bound"])
def add_rows_by_key_kernel(
    total, tiles, order, bounds, first_entry, first_bound, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per key: adds that key's tiles in the order of ``order``, which makes the sum fixed.

    ``tiles`` begin with the entry ``first_entry`` of those that are ordered, ``bounds`` of their keys at
    ``first_bound``.
    """
    key = tl.program_id(0).to(tl.int64)
    first = tl.load(bounds + first_bound + key)
    last = tl.load(bounds + first_bound + key + 1)
    if first < last:
        column = tl.arange(0, BLOCK)
        inside = column < DIM
        added = tl.load(total + key * DIM + column, mask=inside, other=0.0)
        for at in range(first, last):
            entry = tl.load(order + at) - first_entry
            added += tl.load(tiles + entry * DIM + column, mask=inside, other=0.0)
        tl.store(total + key * DIM + column, added, mask=inside)


@triton.jit
def load_rows_at(starts, valid, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Columns ``FIRST .. FIRST + DIM`` of rows given by pointers, ``[rows, BLOCK]``, zero where not valid."""
    column = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if DIM != BLOCK:
        mask = mask & (column < DIM)[None, :]
    return tl.load(starts[:, None] + (FIRST + column)[None, :], mask=mask, other=0.0)


@triton.jit
def load_rows(base, offsets, valid, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`load_rows_at` of rows given by offsets."""
    return load_rows_at(base + offsets, valid, FIRST, DIM, BLOCK)


@triton.jit
def store_rows(base, offsets, valid, value, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Counterpart of :func:`load_rows`; the value is rounded to the type of ``base``."""
    column = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if DIM != BLOCK:
        mask = mask & (column < DIM)[None, :]
    tl.store(base + offsets[:, None] + (FIRST + column)[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(base, offsets, valid, value, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Add to rows in memory that other programs add to; the order of additions is not fixed."""
    column = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if DIM != BLOCK:
        mask = mask & (column < DIM)[None, :]
    tl.atomic_add(base + offsets[:, None] + (FIRST + column)[None, :], value, mask=mask, sem="relaxed")


@triton.jit
def product(a, b, acc, WIDEN: tl.constexpr):
    """``acc + a @ b`` on tensor cores (fp32: without rounding to tf32), sums in fp32."""
    if WIDEN:
        # Triton's interpreter multiplies the bits of bf16 numbers as if they were integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter: TRITON_INTERPRET was 1 when they were defined."""
    return not isinstance(row_lengths_kernel, triton.JITFunction)


def unsupported_here(shape: ShapeClass) -> str | None:
    """Why no kernel can run on the device or with the dtype of this shape class, or None."""
    reason = unsupported_dtype(shape.dtype)
    if reason is not None:
        return reason
    if Version(triton.__version__) < _OLDEST:
        return f"its kernels need triton {_OLDEST} or later, and {triton.__version__} is installed"
    if shape.device == "cuda":
        if torch.version.hip is not None:
            return "its kernels are written and checked for NVIDIA GPUs only"
        if Version(triton.__version__) < _OLDEST_ON_GPU:
            return (
                f"on GPUs its kernels need triton {_OLDEST_ON_GPU} or later, and {triton.__version__} is "
                "installed"
            )
        capability = capability_of(shape.place)
        if capability < _LEAST_CAPABILITY:
            return (
                f"its kernels need compute capability {_LEAST_CAPABILITY / 10}, and this GPU is of "
                f"{capability // 10}.{capability % 10}"
            )
        if not TAKES_BRANCHES.value:
            _log.warning(
                "triton %s compiles the kernels to slower code than %s, and they have not run with it on any "
                "GPU: python -m mindspeed_dsa doctor --device trains a small model with them",
                triton.__version__,
                _TAKES_BRANCHES,
                once=True,
            )
        return None
    if shape.device == "cpu" and interpreted():
        return None
    return (
        "it runs on CUDA devices; on CPU only in Triton's interpreter, "
        "with TRITON_INTERPRET=1 in the environment before triton is imported"
    )


def fails_to_compile(shape: ShapeClass, rehearse: Callable[[ShapeClass], object]) -> str | None:
    """Why calls of this shape class cannot run on the device of their tensors, or None.

    Compiles what they will launch and loads it, so that neither a limit of the device nor an error of the
    compiler shows for the first time in the middle of a step.

    Args:
        shape: of the call; only on a GPU is there something to compile for.
        rehearse: makes such calls on tensors that need no memory.
    """
    if shape.device != "cuda" or not torch.cuda.is_available() or interpreted():
        return None
    try:
        with torch.cuda.device(shape.place), rehearsal(capability_of(shape.place), load):
            rehearse(shape)
    except DoesNotCompile as error:
        return str(error)
    return None


def unsupported_dtype(dtype: torch.dtype) -> str | None:
    """Why kernels cannot take tensors of this dtype, or None."""
    return None if dtype in _DTYPES else "its kernels compute in fp32 and take fp32, bf16 and fp16"


def unsupported_dims(value_dim: int, tail_dim: int) -> str | None:
    """Why a main key of these two parts does not fit, or None."""
    padded = block(value_dim) + (block(tail_dim) if tail_dim else 0)
    if padded <= _MAX_PADDED_DIM:
        return None
    return (
        f"keys of {value_dim} + {tail_dim} numbers, padded to powers of two, exceed the "
        f"{_MAX_PADDED_DIM} for which tiles fit into shared memory"
    )


def block(size: int) -> int:
    """The least block of a product that holds ``size``."""
    return max(MIN_BLOCK, triton.next_power_of_2(size))


def split_dim(dim: int) -> tuple[int, int]:
    """A power of two and the rest: how keys are cut whose value part does not matter."""
    first = min(1 << (dim.bit_length() - 1), 512)
    return first, dim - first


def dim_blocks(value_dim: int, dim: int) -> dict[str, Any]:
    """Constants of kernels that read main keys."""
    tail = dim - value_dim
    return {
        "VALUE_DIM": value_dim,
        "TAIL_DIM": tail,
        "BLOCK_V": block(value_dim),
        "BLOCK_T": block(tail) if tail else 0,
    }


def widen(tensor: Tensor) -> bool:
    """Return whether :func:`product` must widen its operands here."""
    return interpreted() and tensor.dtype == torch.bfloat16


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied if its last dimension has gaps; strides over a single element become 0.

    Such a stride may be anything: einsum leaves 1 in the gradient of a batch of one, and no row of it would
    pass for :func:`aligned`.
    """
    if tensor.stride(-1) != 1:
        return tensor.contiguous()
    strides = [
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    return tensor.as_strided(tensor.shape, [*strides, 1])


def aligned(tensor: Tensor) -> bool:
    """Return whether every row of the last dimension begins at a multiple of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and all(
        stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1]
    )


def packed_indices(topk_indices: Tensor) -> Tensor:
    """int32 and contiguous; what int32 does not hold becomes what is no key either."""
    if topk_indices.dtype != torch.int32:
        topk_indices = topk_indices.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
    return topk_indices.contiguous()


def row_lengths(topk_indices: Tensor, key_length: int) -> Tensor:
    """One past the last entry of each row that is a key, ``[batch * rows]`` int32."""
    batch, rows, topk = topk_indices.shape
    lengths = torch.empty(batch * rows, dtype=torch.int32, device=topk_indices.device)
    if lengths.numel():
        on_grid(row_lengths_kernel, batch * rows)(
            topk_indices, lengths, key_length, topk, BLOCK=1024, num_warps=4
        )
    return lengths


def key_ids(indices: Tensor, first: int, rows_per_batch: int, key_length: int, keys: int) -> Tensor:
    """Number of the key over the whole batch for the entries of some rows.

    Args:
        indices: ``[rows, topk]`` int32.
        first: number of the first row over the batch.
        rows_per_batch: rows of a sequence.
        key_length: keys of a sequence.
        keys: of the batch.

    Returns:
        ``[rows, topk]`` int64; ``keys`` where there is no key.
    """
    row = torch.arange(first, first + len(indices), device=indices.device)
    numbers = indices + (row // rows_per_batch * key_length)[:, None]
    return torch.where(names_key(indices, key_length), numbers, keys)


def tile_bytes(total: Tensor) -> int:
    """Bytes of tiles to gather before :func:`add_rows_by_key` adds them to ``total``, fp32.

    Each time it reads and writes the whole of ``total``: beside this much that is an eighth.
    """
    return max(WORKSPACE_BYTES, 8 * 4 * total.numel())


def add_rows_by_key(total: Tensor, tiles: Tensor, ids: Tensor) -> None:
    """Add gathered rows to the keys they belong to, in row order: deterministic, without atomics.

    Args:
        total: ``[keys, dim]`` fp32, contiguous.
        tiles: ``[rows, topk, dim]`` fp32, contiguous; not read where there is no key.
        ids: ``[rows, topk]`` int64, rows of ``total``; ``keys`` where there is none.
    """
    add_ordered_rows(total, tiles, order_by_key(ids, total.shape[0], len(ids)), 0)


class KeyOrder(NamedTuple):
    """Entries of rows in the order in which their tiles are added to keys, chunk by chunk of rows."""

    entries: Tensor
    """Numbers of entries, counted over the rows."""
    bounds: Tensor
    """First of ``entries`` for each key of each chunk; after a chunk's keys, of what is no key."""
    chunk: int
    """Entries of a chunk."""


def order_by_key(ids: Tensor, keys: int, chunk: int) -> KeyOrder:
    """Sorts the entries of many chunks of rows at once: a sort of a few costs as much as one of many.

    Args:
        ids: ``[rows, topk]`` int64, less than ``keys``; ``keys`` where there is no key.
        keys: that there are.
        chunk: rows of a chunk, from the first row on.
    """
    rows, topk = ids.shape
    parts = -(-rows // chunk)
    span = keys + 1
    # Half of the digits take half of the passes.
    dtype = torch.int32 if parts * span < 2**31 else torch.int64
    part = torch.arange(rows, device=ids.device) // chunk
    # Stable, so that each key's entries stay in row order.
    by_key, entries = (ids + (part * span)[:, None]).to(dtype).flatten().sort(stable=True)
    starts = torch.arange(parts * span, device=ids.device, dtype=dtype)
    return KeyOrder(entries, torch.searchsorted(by_key, starts), chunk * topk)


def add_ordered_rows(total: Tensor, tiles: Tensor, order: KeyOrder, part: int) -> None:
    """:func:`add_rows_by_key` for the tiles of one chunk of those that were ordered."""
    keys, dim = total.shape
    if keys == 0:
        return
    on_grid(add_rows_by_key_kernel, keys)(
        total,
        tiles,
        order.entries,
        order.bounds,
        part * order.chunk,
        part * (keys + 1),
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=4,
    )
