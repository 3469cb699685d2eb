"""What a kernel could reach on a GPU, from what it multiplies, what it moves, and what it was compiled to.

A model, and a bound: it says what no schedule of these instructions exceeds. What nobody counts here, waits
for memory that nothing hides and the order in which programs run, comes on top.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.kernels.compiled import SHARED_MEMORY, Kernel


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU, dense and without sparsity."""

    target: int
    flops: float
    """Of bf16 a second."""
    l2: float
    """Bytes a second from the second-level cache: measured by others on Hopper, scaled for the rest."""
    memory: float
    """Bytes a second."""
    multiprocessors: int
    clock: float
    """Cycles a second, at which ``flops`` was stated."""
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
# Multiply-adds of bf16 per cycle and multiprocessor of Hopper.
_MULTIPLY_ADDS = 2048
# Of a row or a column of a warp group's product.
_INNER_BYTES = 32
# Of a multiprocessor.
_REGISTERS = 65536
# Heads of a program of the attention's forward, for kernels that only know one number of them; in these one
# group of warps works between products while another one multiplies.
_HOPPER_HEADS = {"hopper_forward_kernel": 64, "hopper_few_heads_forward_kernel": 16}
ROWS = "hopper_backward_rows_kernel"
_ROWS_HEADS = 64
_HOPPER = (*_HOPPER_HEADS, "hopper_attention_sum_kernel", ROWS)
SHARING = "hopper_backward_keys_kernel"
# Rows that have a tile in common, as measured on selections of a small model trained on text: of 256 keys two
# neighbours share 0.70, four 0.46, so that 4 rows take 0.46 + 2 x 0.24 + 4 x 0.30 = 2.14 times a row's keys.
SHARERS = 1.87
ATTENTION = (
    *("forward_kernel", "attention_sum_kernel", "backward_keys_kernel", "backward_query_kernel"),
    *(*_HOPPER, SHARING),
)
INDEXER = ("score_slab_kernel", "scores_at_kernel", "score_gradients_kernel")
DENSE = ("dense_lse_kernel", "dense_sum_kernel")


@dataclass(frozen=True)
class Work:
    """Of one row of queries, or of a block of rows where programs share keys among them."""

    programs: int
    flops: float
    """Of its products, padding of heads included."""
    useful: float
    """Without padding."""
    l2: float
    """Bytes to and from the second-level cache."""
    memory: float
    """Bytes of these that no other program asks for."""
    exponentials: float = 0
    operations: float = 0
    """fp32 operations beside the products."""


def seconds(kernel: Kernel, work: Work, gpu: Gpu) -> float:
    """Of this work on the whole GPU, busy with nothing else."""
    products = work.flops / gpu.flops / product_rate(kernel, gpu)
    cycles = work.exponentials / _EXPONENTIALS + work.operations / OPERATIONS
    between = cycles / gpu.multiprocessors / gpu.clock
    # One block of warps in lockstep: what lies between the products of a tile hides behind none of them,
    # unless another program has room beside it.
    if kernel.name in _HOPPER or (
        2 * kernel.shared <= SHARED_MEMORY[gpu.target]
        and 2 * 32 * kernel.warps * kernel.registers <= _REGISTERS
    ):
        between = max(0.0, between - products)
    return max(products + between, work.l2 / gpu.l2, work.memory / gpu.memory)


def product_rate(kernel: Kernel, gpu: Gpu) -> float:
    """Fraction of the GPU's rate at which a kernel's products can be issued."""
    if kernel.mma > 0 or not (kernel.wgmma or kernel.tcgen05):
        return gpu.warp_products
    return operand_rate(kernel.products) if kernel.wgmma else 1.0


def operand_rate(products: dict[str, int]) -> float:
    """How busy products of warp groups keep the tensor cores while shared memory feeds them.

    ``m64n32k16`` takes 16 cycles and reads 3 KiB, for which shared memory takes 24. Its inner numbers are 32
    bytes whatever they are: of FP8 there are 32, which take as long.
    """
    busy = taken = 0.0
    for shape, count in products.items():
        found = re.match(r"n(\d+)k\d+ from (\w+)", shape)
        assert found is not None, shape
        columns = int(found[1])
        compute = 64 * columns * _INNER_BYTES / 2 / _MULTIPLY_ADDS
        read = _INNER_BYTES * (columns + (64 if found[2] == "memory" else 0)) / _SHARED_BYTES
        busy += count * compute
        taken += count * max(compute, read)
    return busy / taken if taken else 1.0


def attention(
    kernel: Kernel, heads: int, topk: int, value_dim: int = 512, dim: int = 576, sharers: float = 1
) -> Work:
    """A row of a kernel of the sparse attention, in two bytes a number.

    Args:
        kernel: as compiled.
        heads: of the row.
        topk: keys of the row.
        value_dim: numbers of a value.
        dim: numbers of a key.
        sharers: rows that have a tile of keys in common, in the mean; the backward's kernel for Hopper
            gathers it, and adds its gradient, once for all of them.
    """
    constants = kernel.constants
    if kernel.name == ROWS:
        programs = -(-heads // _ROWS_HEADS)
        # Scores, gradients of probabilities, of queries, and of keys by two ways. A key is read in two bytes
        # a number, and its gradient added in four.
        width, moved = 3 * dim + 2 * value_dim, heads * (2 * dim + value_dim) * 2
        scores, wanted = programs * _ROWS_HEADS * topk, heads * topk
        return Work(
            *(programs, 2 * scores * width, 2 * wanted * width, programs * 6 * topk * dim + moved, moved),
            *(scores, 8 * scores),
        )
    block = _HOPPER_HEADS.get(kernel.name) or constants.get("BLOCK_H") or constants["HEADS"]
    padded = -(-heads // block) * block
    scores, wanted = padded * topk, heads * topk
    keys = topk * dim * 2
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
    """A row of a kernel of the indexer, in two bytes a number; for the slab a block of rows and of keys."""
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
    """A block of rows and a tile of keys of the dense form's target, all heads, in two bytes a number."""
    constants = kernel.constants
    rows, keys, dim = constants["BLOCK_M"], constants["BLOCK_N"], constants["DIM"]
    # Queries and keys stream by in pieces, for each head again.
    scores, moved = rows * keys * heads, (rows + keys) * heads * dim * 2
    flops = 2 * scores * dim
    return Work(1, flops, flops, moved, 0, scores, 4 * scores)
