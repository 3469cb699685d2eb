"""Helpers of the Triton backends: support checks, tile sizes, and gradients of gathered rows.

Tile sizes come from small tables instead of `triton.autotune`. If each rank autotuned, ranks could use
different tiles, hence different summation orders, and select different keys for the same inputs.
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
# The kernels use features of 3.3. On GPUs no release before 3.4 (torch 2.8's) was tested.
_OLDEST, _OLDEST_ON_GPU = Version("3.3"), Version("3.4")
# Earlier compilers fail on a loop with a branch between warp group products.
_TAKES_BRANCHES = Version("3.7")
TAKES_BRANCHES: tl.constexpr = tl.constexpr(Version(triton.__version__) >= _TAKES_BRANCHES)
# Minimum compute capability, times ten: bf16 products and asynchronous copies need 8.0.
_LEAST_CAPABILITY = 80
# Triton products need at least this many rows, columns and inner elements.
MIN_BLOCK = 16
# Limit of the padded sizes of both parts of a main key together, because a tile of keys and one of queries
# share the memory of a multiprocessor. 512 latent and up to 128 rotary numbers fit.
_MAX_PADDED_DIM = 640
# Bytes of scratch that a call may allocate in addition to its results.
WORKSPACE_BYTES = 512 << 20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def is_key(index, key_length):
    """Return whether ``index`` is the position of a key; only then it may be used as an address."""
    return (index >= 0) & (index < key_length)


@triton.jit
def row_lengths_kernel(indices, lengths, key_length, topk, BLOCK: tl.constexpr):
    """Write the number of entries of a row up to and including its last key; one program per row."""
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
    """Add the tiles of each key's entries to the key's row of ``total``; one program per key.

    The additions follow ``order``, so the sums are deterministic.

    ``tiles`` starts with entry number ``first_entry`` of ``order``, and the keys' bounds start at
    ``bounds[first_bound]``.
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
    """Load columns ``FIRST .. FIRST + DIM`` of rows given by pointers: ``[rows, BLOCK]``, zero if invalid."""
    column = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if DIM != BLOCK:
        mask = mask & (column < DIM)[None, :]
    return tl.load(starts[:, None] + (FIRST + column)[None, :], mask=mask, other=0.0)


@triton.jit
def load_rows(base, offsets, valid, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows given by offsets, as :func:`load_rows_at` does."""
    return load_rows_at(base + offsets, valid, FIRST, DIM, BLOCK)


@triton.jit
def store_rows(base, offsets, valid, value, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows, as :func:`load_rows` loads them; the value is rounded to the dtype of ``base``."""
    column = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if DIM != BLOCK:
        mask = mask & (column < DIM)[None, :]
    tl.store(base + offsets[:, None] + (FIRST + column)[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(base, offsets, valid, value, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Add ``value`` to rows in memory with atomics: other programs add to them too, in no fixed order."""
    column = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if DIM != BLOCK:
        mask = mask & (column < DIM)[None, :]
    tl.atomic_add(base + offsets[:, None] + (FIRST + column)[None, :], value, mask=mask, sem="relaxed")


@triton.jit
def product(a, b, acc, WIDEN: tl.constexpr):
    """Return ``acc + a @ b`` on tensor cores with fp32 sums; fp32 operands are not rounded to tf32."""
    if WIDEN:
        # Triton's interpreter multiplies the bits of bf16 numbers as if they were integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, because TRITON_INTERPRET was 1 at import."""
    return not isinstance(row_lengths_kernel, triton.JITFunction)


def unsupported_here(shape: ShapeClass) -> str | None:
    """Return why the device or dtype of this shape class rules out all Triton kernels, or None."""
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
    """Return why the kernels for this shape class do not compile or load on the device, or None.

    Compiles and loads the kernels in advance, so that device limits and compiler errors show up here and not
    in the middle of a step.

    Args:
        shape: shape class of the calls; only for GPUs is anything compiled.
        rehearse: function that makes the calls on meta tensors.
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
    """Return why kernels cannot take tensors of this dtype, or None."""
    return None if dtype in _DTYPES else "its kernels compute in fp32 and take fp32, bf16 and fp16"


def unsupported_dims(value_dim: int, tail_dim: int) -> str | None:
    """Return why main-attention keys of this value and rotary size are not supported, or None."""
    padded = block(value_dim) + (block(tail_dim) if tail_dim else 0)
    if padded <= _MAX_PADDED_DIM:
        return None
    return (
        f"keys of {value_dim} + {tail_dim} numbers, padded to powers of two, exceed the "
        f"{_MAX_PADDED_DIM} for which tiles fit into shared memory"
    )


def block(size: int) -> int:
    """Return the smallest ``tl.dot`` block size that is at least ``size``."""
    return max(MIN_BLOCK, triton.next_power_of_2(size))


def split_dim(dim: int) -> tuple[int, int]:
    """Split a key size into a power of two and a remainder, for kernels that do not read values."""
    first = min(1 << (dim.bit_length() - 1), 512)
    return first, dim - first


def dim_blocks(value_dim: int, dim: int) -> dict[str, Any]:
    """Return the constexpr arguments for kernels that read main-attention keys."""
    tail = dim - value_dim
    return {
        "VALUE_DIM": value_dim,
        "TAIL_DIM": tail,
        "BLOCK_V": block(value_dim),
        "BLOCK_T": block(tail) if tail else 0,
    }


def widen(tensor: Tensor) -> bool:
    """Return whether :func:`product` must widen operands: for bf16 in the interpreter."""
    return interpreted() and tensor.dtype == torch.bfloat16


def dense_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if its last dimension is strided, with strides of size-1 axes set to 0.

    The stride of a size-1 axis is arbitrary. For example, einsum gives stride 1 to the gradient of a batch of
    one, and :func:`aligned` would then reject the tensor.
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
    """Return the indices as contiguous int32; int64 values beyond int32 are clamped, so they name no key."""
    if topk_indices.dtype != torch.int32:
        topk_indices = topk_indices.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
    return topk_indices.contiguous()


def row_lengths(topk_indices: Tensor, key_length: int) -> Tensor:
    """Return the number of entries up to and including the last key of each row, ``[batch * rows]`` int32."""
    batch, rows, topk = topk_indices.shape
    lengths = torch.empty(batch * rows, dtype=torch.int32, device=topk_indices.device)
    if lengths.numel():
        on_grid(row_lengths_kernel, batch * rows)(
            topk_indices, lengths, key_length, topk, BLOCK=1024, num_warps=4
        )
    return lengths


def key_ids(indices: Tensor, first: int, rows_per_batch: int, key_length: int, keys: int) -> Tensor:
    """Return batch-wide key numbers for the entries of some rows.

    Args:
        indices: ``[rows, topk]`` int32.
        first: batch-wide number of the first row.
        rows_per_batch: rows of a sequence.
        key_length: keys of a sequence.
        keys: number of keys of the batch.

    Returns:
        ``[rows, topk]`` int64; ``keys`` where there is no key.
    """
    row = torch.arange(first, first + len(indices), device=indices.device)  # [rows]
    numbers = indices + (row // rows_per_batch * key_length)[:, None]  # [rows, topk]
    return torch.where(names_key(indices, key_length), numbers, keys)


def tile_bytes(total: Tensor) -> int:
    """Return the bytes of fp32 tiles to collect before :func:`add_ordered_rows` adds them to ``total``.

    Each addition reads and writes all of ``total``. With tiles of 8 times its size, this is an eighth of the
    memory traffic for tiles.
    """
    return max(WORKSPACE_BYTES, 8 * 4 * total.numel())


class KeyOrder(NamedTuple):
    """Sort order of selected entries by key, per chunk of rows, for deterministic sums."""

    entries: Tensor
    """Entry numbers, counted over the rows."""
    bounds: Tensor
    """Positions in ``entries``, per chunk: first entry of each key, then first entry without a key."""
    chunk: int
    """Number of entries per chunk."""


def order_by_key(ids: Tensor, keys: int, chunk: int) -> KeyOrder:
    """Sort the entries of each chunk of rows by key, with one sort for all chunks.

    Args:
        ids: ``[rows, topk]`` int64 key numbers below ``keys``; ``keys`` for entries without a key.
        keys: number of keys.
        chunk: rows per chunk, counted from the first row.
    """
    rows, topk = ids.shape
    parts = -(-rows // chunk)
    span = keys + 1
    # A radix sort of half as many bits takes half of the passes.
    dtype = torch.int32 if parts * span < 2**31 else torch.int64
    part = torch.arange(rows, device=ids.device) // chunk  # [rows]
    # One sort for all chunks, because a small sort costs as much as a large one. It is stable, so that each
    # key's entries stay in row order.
    by_key, entries = (ids + (part * span)[:, None]).to(dtype).flatten().sort(stable=True)  # [rows * topk]
    starts = torch.arange(parts * span, device=ids.device, dtype=dtype)  # [parts * span]
    return KeyOrder(entries, torch.searchsorted(by_key, starts), chunk * topk)


def add_ordered_rows(total: Tensor, tiles: Tensor, order: KeyOrder, part: int) -> None:
    """Add the tiles of one chunk to their keys, in an order from :func:`order_by_key`."""
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
