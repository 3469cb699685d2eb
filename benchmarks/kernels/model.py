"""Bound on a kernel's rate on a GPU, from its products, its traffic and its compiled code.

No schedule of these instructions exceeds the bound. Uncounted costs, for example unhidden waits for memory
and the order in which programs run, come on top.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.kernels.compiled import SHARED_MEMORY, Kernel


@dataclass(frozen=True)
class Gpu:
    """Dense rates of a GPU."""

    target: int
    flops: float
    """bf16 operations per second."""
    l2: float
    """Bytes per second from the L2 cache: measured by others on Hopper, scaled for the rest."""
    memory: float
    """Bytes per second from memory."""
    multiprocessors: int
    clock: float
    """Cycles per second at which ``flops`` was stated."""
    warp_products: float
    """Fraction of ``flops`` that products of single warps reach."""


GPUS = {
    "A100": Gpu(80, 312e12, 4.0e12, 2.04e12, 108, 1.41e9, 1.0),
    "H100": Gpu(90, 989e12, 5.5e12, 3.35e12, 132, 1.755e9, 0.62),
    "H200": Gpu(90, 989e12, 5.5e12, 4.8e12, 132, 1.755e9, 0.62),
    "B200": Gpu(100, 2250e12, 10e12, 8.0e12, 148, 1.85e9, 0.25),
}
# Per cycle and multiprocessor: bytes that products read from shared memory, exponentials, other operations.
_SHARED_BYTES, _EXPONENTIALS, OPERATIONS = 128, 16, 128
# Multiply-adds of bf16 per cycle and multiprocessor on Hopper.
_MULTIPLY_ADDS = 2048
# Bytes of a row or a column of a warp group's product.
_INNER_BYTES = 32
# Registers of a multiprocessor.
_REGISTERS = 65536
# Heads per program of the attention's forward, for kernels that support only one number. In these one group
# of warps works between products while another one multiplies.
_HOPPER_HEADS = {"hopper_forward_kernel": 64, "hopper_few_heads_forward_kernel": 16}
# Kernels that compute all gradients of a row, for many and for few heads.
ROWS = ("hopper_backward_rows_kernel", "hopper_backward_few_heads_kernel")
_ROWS_HEADS = 64
_HOPPER = (*_HOPPER_HEADS, "hopper_attention_sum_kernel", *ROWS)
SHARING = "hopper_backward_keys_kernel"
# Mean number of rows that share a tile, measured on selections of a small model trained on text. Of 256 keys
# two neighbours share 0.70, four 0.46, so that 4 rows take 0.46 + 2 x 0.24 + 4 x 0.30 = 2.14 times a row's
# keys.
SHARERS = 1.87
ATTENTION = (
    *("forward_kernel", "attention_sum_kernel", "backward_keys_kernel", "backward_query_kernel"),
    *(*_HOPPER, SHARING),
)
INDEXER = ("score_slab_kernel", "scores_at_kernel", "score_gradients_kernel")
DENSE = ("dense_lse_kernel", "dense_sum_kernel")


@dataclass(frozen=True)
class Work:
    """Work of one row of queries, or of a block of rows if its programs share keys."""

    programs: int
    flops: float
    """Operations of the products, padding of heads included."""
    useful: float
    """Operations of the products without padding."""
    l2: float
    """Bytes to and from the L2 cache."""
    memory: float
    """L2 cache bytes that no other program asks for."""
    exponentials: float = 0
    operations: float = 0
    """fp32 operations other than products."""


def seconds(kernel: Kernel, work: Work, gpu: Gpu) -> float:
    """Return the seconds of the work on an otherwise idle GPU."""
    products = work.flops / gpu.flops / product_rate(kernel, gpu)
    cycles = work.exponentials / _EXPONENTIALS + work.operations / OPERATIONS
    between = cycles / gpu.multiprocessors / gpu.clock
    # One block of warps runs in lockstep: work between the products of a tile is hidden only if another
    # program fits on the multiprocessor.
    if kernel.name in _HOPPER or (
        2 * kernel.shared <= SHARED_MEMORY[gpu.target]
        and 2 * 32 * kernel.warps * kernel.registers <= _REGISTERS
    ):
        between = max(0.0, between - products)
    # Traffic overlaps with the products, so the slowest of the three decides.
    return max(products + between, work.l2 / gpu.l2, work.memory / gpu.memory)


def product_rate(kernel: Kernel, gpu: Gpu) -> float:
    """Return the fraction of the GPU's rate at which a kernel's products can be issued."""
    if kernel.mma > 0 or not (kernel.wgmma or kernel.tcgen05):
        return gpu.warp_products
    return operand_rate(kernel.products) if kernel.wgmma else 1.0


def operand_rate(products: dict[str, int]) -> float:
    """Return the fraction of time in which warp groups keep the tensor cores busy, fed by shared memory.

    ``m64n32k16`` takes 16 cycles and reads 3 KiB, for which shared memory takes 24. The inner dimension is
    always 32 bytes: 32 FP8 numbers take as long as 16 bf16 numbers.
    """
    busy = taken = 0.0
    for shape, count in products.items():
        match = re.match(r"n(\d+)k\d+ from (\w+)", shape)
        assert match is not None, shape
        columns = int(match[1])
        compute = 64 * columns * _INNER_BYTES / 2 / _MULTIPLY_ADDS
        read = _INNER_BYTES * (columns + (64 if match[2] == "memory" else 0)) / _SHARED_BYTES
        busy += count * compute
        taken += count * max(compute, read)
    return busy / taken if taken else 1.0


def attention(
    kernel: Kernel, heads: int, topk: int, value_dim: int = 512, dim: int = 576, sharers: float = 1
) -> Work:
    """Return the work of a row in a sparse attention kernel, in two bytes per number.

    Args:
        kernel: compiled kernel.
        heads: heads of the row.
        topk: keys of the row.
        value_dim: width of a value.
        dim: width of a key.
        sharers: mean number of rows that share a tile of keys; Hopper's backward kernel gathers the tile, and
            adds its gradient, once for all of them.
    """
    constants = kernel.constants
    if kernel.name in ROWS:
        block = constants.get("HEADS", _ROWS_HEADS)
        programs = -(-heads // block)
        # Products: scores, gradients of probabilities, of queries, and of keys in two ways. A key is read in
        # two bytes per number, and its gradient added in four.
        width, moved = 3 * dim + 2 * value_dim, heads * (2 * dim + value_dim) * 2
        scores, wanted = programs * block * topk, heads * topk
        return Work(
            *(programs, 2 * scores * width, 2 * wanted * width, programs * 6 * topk * dim + moved, moved),
            *(scores, 8 * scores),
        )
    block = _HOPPER_HEADS.get(kernel.name) or constants.get("BLOCK_H") or constants["HEADS"]
    # 16 heads in blocks of 64 cost the products of 64 heads.
    padded = -(-heads // block) * block
    scores, wanted = padded * topk, heads * topk
    # 2048 keys x 576 x 2 bytes = 2.25 MiB.
    keys = topk * dim * 2
    # Queries and outputs: 64 heads x (576 + 512) x 2 bytes = 136 KiB.
    outer = heads * (dim + value_dim) * 2
    if kernel.name in ("forward_kernel", "backward_query_kernel", *_HOPPER_HEADS):
        programs = padded // block
        if kernel.name != "backward_query_kernel":
            width = dim + value_dim * constants.get("WITH_OUT", True)
            return Work(
                *(programs, 2 * scores * width, 2 * wanted * width, programs * keys + outer, outer),
                *(scores, 8 * scores),
            )
        moved = heads * (topk * constants.get("PARTS", 1) + dim) * 2
        return Work(programs, 2 * scores * dim, 2 * wanted * dim, programs * keys + moved, moved)
    programs = -(-topk // constants.get("BLOCK_N", 64))
    if kernel.name == "hopper_attention_sum_kernel":
        programs = 1
    if kernel.name in ("attention_sum_kernel", "hopper_attention_sum_kernel"):
        moved = programs * heads * dim * 2 + keys
        return Work(programs, 2 * scores * dim, 2 * wanted * dim, moved, topk * 4, scores, 4 * scores)
    gradients = heads * topk * 2
    return Work(
        programs,
        # Scores and the gradient of probabilities are one product, of pairs: a pair has zeros for its tail.
        flops=2 * scores * 4 * dim,
        useful=2 * wanted * 2 * (dim + value_dim),
        l2=programs * outer + 3 * keys / sharers + gradients,
        memory=gradients,
        exponentials=scores,
        operations=8 * scores,
    )


def indexer(kernel: Kernel, topk: int) -> Work:
    """Return the work of a row in an indexer kernel, in two bytes per number; for the slab, of a block."""
    constants = kernel.constants
    heads, dim, keys = constants["HEADS"], constants["DIM"], constants["BLOCK_N"]
    if kernel.name == "score_slab_kernel":
        rows = constants["BLOCK_Q"]
        flops, scores = 2 * rows * keys * heads * dim, rows * keys
        moved = keys * dim * 2 + rows * heads * dim * 2 + scores * 4
        return Work(1, flops, flops, moved, scores * 4, operations=3 * scores * heads)
    programs = -(-topk // keys)
    flops, outer = 2 * topk * heads * dim, heads * dim * 2
    if kernel.name == "scores_at_kernel":
        moved = topk * dim * 2 + programs * outer + topk * 8
        return Work(programs, flops, flops, moved, topk * 8, operations=3 * topk * heads)
    moved = topk * dim * (2 + 4) + topk * 8 + 2 * outer
    return Work(1, 3 * flops, 3 * flops, moved, topk * 8 + 2 * outer, operations=6 * topk * heads)


def dense(kernel: Kernel, heads: int) -> Work:
    """Return the work of a block of rows and a tile of keys in the dense form, all heads, in bf16."""
    constants = kernel.constants
    rows, keys, dim = constants["BLOCK_M"], constants["BLOCK_N"], constants["DIM"]
    # Queries and keys are streamed in pieces, once more for each head.
    scores, moved = rows * keys * heads, (rows + keys) * heads * dim * 2
    flops = 2 * scores * dim
    return Work(1, flops, flops, moved, 0, scores, 4 * scores)
