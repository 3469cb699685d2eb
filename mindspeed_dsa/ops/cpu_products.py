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
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Below this much work per product, or above this many threads, one batched call is faster than a loop.
_LOOP_MIN_FLOPS = 4_000_000
_LOOP_MAX_THREADS = 4
# Of CBLAS.
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112


def mkl_knows_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether there is MKL, and the processor is Intel's: on others it uses half of the vector width."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        return "GenuineIntel" in cpuinfo.read_text()
    except OSError:
        return False


def _onednn_linear() -> Any:
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.is_available():
        return None
    namespace = torch.ops.mkldnn
    return namespace._linear_pointwise.default if hasattr(namespace, "_linear_pointwise") else None


_LINEAR = _onednn_linear()
_MKL_IS_FAST = mkl_knows_processor()


@cache
def multiplies_bf16() -> bool:
    """Whether the processor multiplies bf16, and PyTorch has the product that keeps its sums in fp32.

    That is so on Intel's processors with AMX (the fourth generation of Xeon and later) or AVX512-BF16.
    """
    return _processor_has_bf16() and mkl_knows_processor() and _gemm() is not None


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what products take their operands: bf16 stays where :func:`multiplies_bf16`, else fp32 or fp64."""
    if dtype == torch.bfloat16 and multiplies_bf16():
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
        _bf16_product(a, b, out, scale, float(add))
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
        _bf16_product(x, weight.t(), out, 1.0, 0.0)
        return out.relu_() if relu else out
    # For a weight with gaps between its rows oneDNN has only its unoptimised reference kernel.
    dense = weight.is_contiguous() or weight.t().is_contiguous()
    if dense and _onednn_takes(x.dtype):
        fused = relu and _stays_finite(x, weight)
        out = _LINEAR(x, weight, None, "relu" if fused else "none", [], "")
        return out.relu_() if relu and not fused else out
    out = torch.mm(x, weight.t())
    return out.relu_() if relu else out


def linear_each(x: Tensor, weight: Tensor, relu: bool = False) -> Tensor:
    """:func:`linear` of several pairs: ``[g, m, k]``, ``[g, n, k]`` -> ``[g, m, n]``."""
    if len(x) == 1:
        return linear(x[0], weight[0], relu)[None]
    if x.dtype == torch.bfloat16 or _onednn_takes(x.dtype):
        return torch.stack([linear(one, other, relu) for one, other in zip(x, weight, strict=True)])
    out = torch.bmm(x, weight.mT)
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


def _bf16_product(a: Tensor, b: Tensor, out: Tensor, scale: float, beta: float) -> None:
    gemm = _gemm()
    if gemm is None or b.dtype != torch.bfloat16 or out.dtype != torch.float32:
        raise TypeError(f"no product of {a.dtype} and {b.dtype} into {out.dtype} here: ask operand_dtype")
    (m, k), n = a.shape[-2:], b.shape[-1]
    if n > 1 and out.stride(-1) != 1:
        raise ValueError("a product of bf16 operands writes rows whose numbers are neighbours in memory")
    (a, a_order, a_gap), (b, b_order, b_gap) = _rows(a), _rows(b)
    gap = max(out.stride(-2), n)
    at, count, steps = (a.data_ptr(), b.data_ptr(), out.data_ptr()), 1, (0, 0, 0)
    if a.dim() == 3:
        count, steps = len(a), (2 * a.stride(0), 2 * b.stride(0), out.element_size() * out.stride(0))
    for i in range(count):
        p, q, r = (start + i * step for start, step in zip(at, steps, strict=True))
        gemm(_ROW_MAJOR, a_order, b_order, m, n, k, scale, p, a_gap, q, b_gap, beta, r, gap)


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """The matrix or matrices as CBLAS reads them: whether transposed, and from row to row in memory."""
    rows, columns = x.shape[-2:]
    if x.stride(-1) == 1 or columns == 1:
        if x.stride(-2) >= columns or rows == 1:
            return x, _AS_IT_IS, max(x.stride(-2), columns) if rows > 1 else columns
    elif (x.stride(-2) == 1 or rows == 1) and x.stride(-1) >= rows:
        return x, _TRANSPOSED, x.stride(-1)
    return x.contiguous(), _AS_IT_IS, columns


def _processor_has_bf16() -> bool:
    """Asked of PyTorch, whose releases differ in what they call it."""
    asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in asked if hasattr(torch.cpu, name))


@cache
def _gemm() -> Any:
    """MKL's product in the library that PyTorch has loaded, or None."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkl.is_available():
        return None
    try:
        function = ctypes.CDLL(
            str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
        ).cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    sizes = [ctypes.c_int] * 6
    address, gap, factor = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    function.argtypes = [*sizes, factor, address, gap, address, gap, factor, address, gap]
    function.restype = None
    return function
