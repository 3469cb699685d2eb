"""FP8 key selection in Triton, for CUDA devices: the Lightning Indexer's kernels on e4m3 numbers.

All keys are quantised at the start, queries when their slab of scores is computed. The score kernel
multiplies scores with the key factors.

GPUs from compute capability 8.9 on multiply e4m3 numbers. Older GPUs multiply the same numbers in bf16, which
represents them exactly. The precision of the sums is the tensor cores': see README.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.lightning_indexer.triton import (
    rehearsed_call,
    score_slab,
    select_by,
    unsupported_with,
)
from mindspeed_dsa.ops.quantised_indexer.arithmetic import QuantisedCall
from mindspeed_dsa.ops.quantised_indexer.triton_quantise import quantise
from mindspeed_dsa.ops.row_ranges import Ranges
from mindspeed_dsa.ops.triton.launch import REHEARSED_KEYS, REHEARSED_ROWS, capability_of

# Minimum compute capability, times ten, whose tensor cores take e4m3.
_MULTIPLIES_FP8 = 89
# Minimum number of inner elements of an e4m3 product.
_LEAST_DIM = 32


def unsupported(shape: ShapeClass) -> str | None:
    """Return why this backend cannot take calls of this shape, or None."""
    return unsupported_with(shape, rehearse)


def rehearse(shape: ShapeClass, rows: int = REHEARSED_ROWS, keys: int = REHEARSED_KEYS) -> None:
    """Run the selection on meta tensors, to compile the kernels for this shape.

    Args:
        shape: shape class of the later calls. The dtype of queries and keys affects only the quantisation.
        rows: number of rows of the call.
        keys: number of keys of the call.
    """
    call, topk, ranges = rehearsed_call(shape, rows, keys)
    select(QuantisedCall(call.query, call.key, call.weights), topk, ranges)


def select(call: QuantisedCall, topk: int, ranges: Ranges) -> Tensor:
    """Return the selected keys of each query, ``[batch, query_length, topk]`` int32."""
    dtype = operand_dtype(call.query.device, call.query.shape[3])
    key, of_key = quantise(call.key, call.powers_of_two, dtype)

    def score(b: int, rows: slice, starts: Tensor, ends: Tensor, slab: Tensor) -> None:
        query, of_query = quantise(call.query[b, rows], call.powers_of_two, dtype)
        weights = call.weights[b, rows].float() * of_query
        score_slab(query, key[b], weights, starts, ends, slab, call.use_relu, of_key[b])

    return select_by(call, topk, ranges, score)[0]


def operand_dtype(device: torch.device, head_dim: int) -> torch.dtype:
    """Return float8 if tensor cores multiply it for this size, else bf16; both represent e4m3 exactly.

    Args:
        device: device of the call; in a rehearsal, the rehearsed capability decides.
        head_dim: number of inner elements of a product.
    """
    takes_fp8 = capability_of(device) >= _MULTIPLIES_FP8 and head_dim >= _LEAST_DIM
    return torch.float8_e4m3fn if takes_fp8 else torch.bfloat16
