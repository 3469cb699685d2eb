"""Shared by the CPU backends: products, each by the fastest of the libraries that PyTorch carries.

* fp32: PyTorch's own products go to the BLAS that it was built with. On x86 that is MKL, which uses half of
  the vector width where the processor is not Intel's; oneDNN, which PyTorch also carries, does not. Where it
  is, MKL takes half of oneDNN's time for products as small as these.
* bf16, where the processor multiplies bf16: sums are in fp32, and so is the result. PyTorch's own products
  would round it to bf16, too coarse for scores. MKL's ``cblas_gemm_bf16bf16f32`` does not; it is called in
  the library that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu_kernel import (
    block_product,
    has_kernel,
    mkl_knows_processor,
    of_torch,
    on_x86,
    pairs_of_rows,
    processor_has_bf16,
)

# Below this much work per product, or above this many threads, one batched call is faster than a loop.
_LOOP_MIN_FLOPS = 4_000_000
_LOOP_MAX_THREADS = 4
# From this many rows and columns on, laying out a bf16 operand for a kernel takes less time than it saves.
_KERNEL_MIN_ROWS = 64
# With fewer, reading a bf16 operand takes half the time and laying it out as much again.
_FEWEST_ROWS_IN_BF16 = 16
# Of CBLAS.
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112


def _onednn_linear() -> Any:
    if not on_x86() or not torch.backends.mkldnn.is_available():
        return None
    namespace = torch.ops.mkldnn
    return namespace._linear_pointwise.default if hasattr(namespace, "_linear_pointwise") else None


_LINEAR = _onednn_linear()
_MKL_IS_FAST = mkl_knows_processor()


def multiplies_bf16() -> bool:
    """Whether the processor multiplies bf16, and PyTorch has fast products that keep their sums in fp32.

    The processor does with AMX (Intel's Xeon since the fourth generation) or AVX512-BF16 (these, and AMD's
    since Zen 4).
    """
    if not processor_has_bf16() or _gemm() is None:
        return False
    return mkl_knows_processor() or has_kernel(torch.bfloat16)


def operand_dtype(dtype: torch.dtype, rows: float = math.inf) -> torch.dtype:
    """In what products take their operands: bf16 stays where :func:`multiplies_bf16`, else fp32 or fp64.

    Args:
        dtype: of the numbers.
        rows: of the first operand. For few, bf16 stays only where MKL multiplies it at its full rate.
    """
    enough = rows >= _FEWEST_ROWS_IN_BF16 or mkl_knows_processor()
    if dtype == torch.bfloat16 and enough and multiplies_bf16():
        return dtype
    return compute_dtype(dtype)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums, and all that is between products, are in fp32, or in fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0, add: bool = False) -> None:
    """``scale * (a @ b)`` into ``out``, or added to it.

    Args:
        a: ``[m, k]`` or ``[g, m, k]``, in bf16 (where :func:`multiplies_bf16`), fp32 or fp64.
        b: ``[k, n]`` or ``[g, k, n]``, likewise.
        out: ``[m, n]`` or ``[g, m, n]`` in :func:`compute_dtype`.
        scale: factor.
        add: whether to add.
    """
    if a.dtype == torch.bfloat16:
        _bf16_product(a, b, out, scale, add)
    elif one_by_one(2 * a.shape[-2] * a.shape[-1] * b.shape[-1], a.dtype):
        pairs = zip(a, b, out, strict=True) if a.dim() == 3 else ((a, b, out),)
        for one, other, result in pairs:
            _onednn_product(one, other, result, scale, add)
    elif a.dim() == 3:
        torch.baddbmm(out, a, b, beta=float(add), alpha=scale, out=out)
    else:
        torch.addmm(out, a, b, beta=float(add), alpha=scale, out=out)


def linear(x: Tensor, weight: Tensor, relu: bool = False) -> Tensor:
    """``x @ weight.T``, optionally clamped at zero: ``[m, k]``, ``[n, k]`` -> ``[m, n]``, as a product."""
    if x.dtype == torch.bfloat16:
        out = x.new_empty(len(x), len(weight), dtype=torch.float32)
        _bf16_product(x, weight.t(), out, 1.0, False)
        return out.relu_() if relu else out
    # For a weight with gaps between its rows oneDNN has only its unoptimised reference kernel.
    dense = weight.is_contiguous() or weight.t().is_contiguous()
    if dense and _onednn_takes(x.dtype):
        fused = relu and _stays_finite(x, weight)
        out = _LINEAR(x, weight, None, "relu" if fused else "none", [], "")
        return out.relu_() if relu and not fused else out
    out = torch.mm(x, weight.t())
    return out.relu_() if relu else out


def _stays_finite(x: Tensor, weight: Tensor) -> bool:
    """Whether no product can be NaN, which the relu that oneDNN fuses would turn into zero."""
    # No product of two rows is larger than that of their lengths. No pass is faster than a sum of squares.
    squares = (torch.dot(flat, flat) for flat in (x.reshape(-1), weight.reshape(-1)))
    return math.isfinite(math.prod(float(square) for square in squares))


def one_by_one(flops: int, dtype: torch.dtype) -> bool:
    """Whether one oneDNN call per product of this size is faster than one batched call."""
    return flops >= _LOOP_MIN_FLOPS and torch.get_num_threads() <= _LOOP_MAX_THREADS and _onednn_takes(dtype)


def _onednn_product(a: Tensor, b: Tensor, out: Tensor, scale: float, add: bool) -> None:
    # oneDNN packs the second operand on every call: the smaller one takes that place, if it can.
    found = linear(b.t(), a).t() if a.shape[0] < b.shape[1] and b.t().is_contiguous() else linear(a, b.t())
    if add:
        out.add_(found, alpha=scale)
    elif scale != 1:
        torch.mul(found, scale, out=out)
    else:
        out.copy_(found)


def _onednn_takes(dtype: torch.dtype) -> bool:
    if _LINEAR is None or _MKL_IS_FAST or dtype != torch.float32:
        return False
    return bool(torch.backends.mkldnn.enabled)


def _bf16_product(a: Tensor, b: Tensor, out: Tensor, scale: float, add: bool) -> None:
    if _gemm() is None or b.dtype != torch.bfloat16 or out.dtype != torch.float32:
        raise TypeError(f"no product of {a.dtype} and {b.dtype} into {out.dtype} here: ask operand_dtype")
    (m, k), n = a.shape[-2:], b.shape[-1]
    if n > 1 and out.stride(-1) != 1:
        raise ValueError("a product of bf16 operands writes rows whose numbers are neighbours in memory")
    alone = torch.get_num_threads() == 1
    if not alone or min(m, n) < _KERNEL_MIN_ROWS or k % 2 or not has_kernel(a.dtype):
        _mkl_product(a, b, out, scale, add)
    elif a.dim() == 2:
        _kernel_product(a, b, out, scale, add)
    else:
        for one, other, result in zip(a, b, out, strict=True):
            _kernel_product(one, other, result, scale, add)


def _mkl_product(a: Tensor, b: Tensor, out: Tensor, scale: float, add: bool) -> None:
    gemm, (m, k), n = _gemm(), a.shape[-2:], b.shape[-1]
    (a, a_order, a_gap), (b, b_order, b_gap) = _rows(a), _rows(b)
    gap = max(out.stride(-2), n)
    at, count, steps = (a.data_ptr(), b.data_ptr(), out.data_ptr()), 1, (0, 0, 0)
    if a.dim() == 3:
        count, steps = len(a), (2 * a.stride(0), 2 * b.stride(0), out.element_size() * out.stride(0))
    for i in range(count):
        p, q, r = (start + i * step for start, step in zip(at, steps, strict=True))
        gemm(_ROW_MAJOR, a_order, b_order, m, n, k, scale, p, a_gap, q, b_gap, float(add), r, gap)


def _kernel_product(a: Tensor, b: Tensor, out: Tensor, scale: float, add: bool) -> None:
    # The kernel takes rows: of a transposed first operand it computes the transposed result.
    turned = a.stride(1) != 1 and a.shape[0] > b.shape[1]
    if turned:
        a, b = b.t(), a.t()
    pairs, apart = (torch.empty(len(b) // 2, b.shape[1], dtype=torch.int32) for _ in range(2))
    packed = pairs_of_rows(b.contiguous(), pairs, apart)
    if scale == 1 and not turned:
        block_product(a.contiguous(), packed, out, add)
        return
    found = out.new_empty(len(a), b.shape[1])
    block_product(a.contiguous(), packed, found)
    found = found.t() if turned else found
    if add:
        out.add_(found, alpha=scale)
    else:
        torch.mul(found, scale, out=out)


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """The matrix or matrices as CBLAS reads them: whether transposed, and from row to row in memory."""
    rows, columns = x.shape[-2:]
    if x.stride(-1) == 1 or columns == 1:
        if x.stride(-2) >= columns or rows == 1:
            return x, _AS_IT_IS, max(x.stride(-2), columns) if rows > 1 else columns
    elif (x.stride(-2) == 1 or rows == 1) and x.stride(-1) >= rows:
        return x, _TRANSPOSED, x.stride(-1)
    return x.contiguous(), _AS_IT_IS, columns


@cache
def _gemm() -> Any:
    """MKL's product in the library that PyTorch has loaded, or None."""
    if not on_x86() or not torch.backends.mkl.is_available():
        return None
    function = of_torch("cblas_gemm_bf16bf16f32")
    if function is None:
        return None
    sizes = [ctypes.c_int] * 6
    address, gap, factor = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    function.argtypes = [*sizes, factor, address, gap, address, gap, factor, address, gap]
    function.restype = None
    return function
