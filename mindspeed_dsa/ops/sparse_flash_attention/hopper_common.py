"""Parts that the kernels for Hopper share: a row's place in memory, barriers, copies, powers of two."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from mindspeed_dsa.ops.triton.common import LOG2E as LOG2E_VALUE

# Renamed with Triton 3.8, and with 3.9.
load_asynchronously = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_memory = gl.shared_memory_descriptor
seen_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret
LOG2E: gl.constexpr = gl.constexpr(LOG2E_VALUE)
# Keys of a tile, columns of a value and of the rest of a key.
BLOCK: gl.constexpr = gl.constexpr(64)
VALUE: gl.constexpr = gl.constexpr(512)
TAIL: gl.constexpr = gl.constexpr(64)
# Threads of the group that copies: each says for itself that its copies have arrived.
COPYING: gl.constexpr = gl.constexpr(128)
# Eight threads copy 128 bytes of a row, 16 each: a whole line of shared memory as products read it.
COPIES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
TILE: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def place_of_row(row, query, key_value, lengths, rows_per_batch, query_batch, query_row, key_batch):
    """Where a row's queries and its batch's keys begin, and how long its list of keys is."""
    batch = row // rows_per_batch
    base = query + batch * query_batch + (row % rows_per_batch) * query_row
    return base, key_value + batch * key_batch, gl.load(lengths + row)


@gluon.jit
def barriers_of(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers in shared memory, each of which waits for so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(NUMBER):
        mbarrier.init(made.index(number), count=ARRIVALS)
    return made


@gluon.jit
def barrier_of(ARRIVALS: gl.constexpr):
    """One of :func:`barriers_of`."""
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(made, count=ARRIVALS)
    return made


@gluon.jit
def copy_rows(target, starts, mask, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Columns ``FIRST .. FIRST + COLUMNS`` of rows, zeros where masked."""
    column = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COPIES))
    load_asynchronously(target, starts[:, None] + column[None, :], mask=mask[:, None])


@gluon.jit
def load_indices(row_indices, tile, length, layout: gl.constexpr):
    """Entries of a tile, -1 behind the last key."""
    position = tile * BLOCK + gl.arange(0, BLOCK, layout=layout)
    return gl.load(row_indices + position, mask=position < length, other=-1)


@gluon.jit
def power_of_two(x):
    """``2 ** x`` in one instruction; what is too small for a normal number becomes 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def kept_inside(number):
    """The number, as the compiler cannot know it: what follows from it is not computed ahead of a loop.

    Descriptors of products' operands are as many as products. Ahead of a loop they would all be kept, beyond
    the registers that there are.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )
