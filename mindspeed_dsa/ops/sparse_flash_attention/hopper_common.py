"""Helpers that the Hopper kernels share: row addresses, barriers, copies, and powers of two."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from mindspeed_dsa.ops.triton.common import LOG2E as LOG2E_VALUE

# The first name is new in Triton 3.8, the second in 3.9.
load_asynchronously = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_memory = gl.shared_memory_descriptor
# Waits for all warps of the partition; the first name is new in Triton 3.7.
group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
seen_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret
LOG2E: gl.constexpr = gl.constexpr(LOG2E_VALUE)
# Keys per tile, columns of a value, and columns of the rest of a key.
BLOCK: gl.constexpr = gl.constexpr(64)
VALUE: gl.constexpr = gl.constexpr(512)
TAIL: gl.constexpr = gl.constexpr(64)
# Threads of the copying warp group: each arrives at a barrier when its own copies have finished.
COPYING: gl.constexpr = gl.constexpr(128)
# Eight threads copy 128 bytes of a row, 16 each: a whole line of shared memory as products read it.
COPIES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
TILE: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def place_of_row(row, query, key_value, lengths, rows_per_batch, query_batch, query_row, key_batch):
    """Return the addresses of a row's queries and of its batch's keys, and the length of its list of keys."""
    batch = row // rows_per_batch
    base = query + batch * query_batch + (row % rows_per_batch) * query_row
    return base, key_value + batch * key_batch, gl.load(lengths + row)


@gluon.jit
def barriers_of(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return ``NUMBER`` barriers in shared memory; each waits for ``ARRIVALS`` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(NUMBER):
        mbarrier.init(made.index(number), count=ARRIVALS)
    return made


@gluon.jit
def barrier_of(ARRIVALS: gl.constexpr):
    """Return one barrier that waits for ``ARRIVALS`` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(made, count=ARRIVALS)
    return made


@gluon.jit
def copy_rows(target, starts, mask, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Copy columns ``FIRST .. FIRST + COLUMNS`` of rows to shared memory, zeros where masked."""
    column = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COPIES))
    load_asynchronously(target, starts[:, None] + column[None, :], mask=mask[:, None])


@gluon.jit
def load_indices(row_indices, tile, length, layout: gl.constexpr):
    """Load a tile of a row's key positions, with -1 past the row's last key."""
    position = tile * BLOCK + gl.arange(0, BLOCK, layout=layout)
    return gl.load(row_indices + position, mask=position < length, other=-1)


@gluon.jit
def power_of_two(x):
    """Return ``2 ** x`` in one instruction; results below the normal range become 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def kept_inside(number):
    """Return an opaque copy of ``number``, from which the compiler cannot hoist computations out of a loop.

    Each product has its own WGMMA operand descriptors. If all of them were hoisted, they would stay in
    registers, which would spill.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )
