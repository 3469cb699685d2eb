"""Shared by the CPU backends: products, each by the fastest of the libraries that PyTorch carries.

* fp32: PyTorch's own products go to the BLAS that it was built with. On x86 that is MKL, which uses half of
  the vector width where the processor is not Intel's; oneDNN, which PyTorch also carries, does not. Where it
  is, MKL takes half of oneDNN's time for products as small as these.
* bf16, where ``bf16.py`` finds that faster than widening: sums are in fp32, and so is the result.
  PyTorch's own products would round it to bf16, too coarse for scores. MKL's ``cblas_gemm_bf16bf16f32`` does
  not; it is called in the library that PyTorch has loaded, after a probe.
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
_LARGEST_INT = 2**31 - 1


@cache
def mkl_knows_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether there is MKL on Intel's processor; on others it uses half of the vector width."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        return "GenuineIntel" in cpuinfo.read_text()
    except OSError:
        return False


def _on_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _onednn_linear() -> Any:
    if not _on_x86() or not torch.backends.mkldnn.is_available():
        return None
    namespace = torch.ops.mkldnn
    return namespace._linear_pointwise.default if hasattr(namespace, "_linear_pointwise") else None


_LINEAR = _onednn_linear()
_MKL_IS_FAST = mkl_knows_processor()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums, and all that is between products, are in fp32, or in fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0, add: bool = False) -> None:
    """``scale * (a @ b)`` into ``out``, or added to it.

    Args:
        a: ``[m, k]`` or ``[g, m, k]``, in bf16 (where :func:`has_bf16_product`), fp32 or fp64.
        b: ``[k, n]`` or ``[g, k, n]``, likewise.
        out: ``[m, n]`` or ``[g, m, n]`` in :func:`compute_dtype`.
        scale: factor.
        add: whether to add.
    """
    if a.dtype == torch.bfloat16:
        _bf16_product(a, b, out, scale, add)
        return
    if a.dim() == 3 and len(a) == 1:
        a, b, out = a[0], b[0], out[0]
    if one_by_one(2 * a.shape[-2] * a.shape[-1] * b.shape[-1], a.dtype):
        pairs = zip(a, b, out, strict=True) if a.dim() == 3 else ((a, b, out),)
        for one, other, result in pairs:
            _onednn_product(one, other, result, scale, add)
    elif a.dim() == 3 and add and not out.is_contiguous():
        # PyTorch would multiply one by one, each by all threads: far slower than together.
        out.add_(torch.bmm(a, b), alpha=scale)
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
    """Return whether no product can be NaN, which the relu that oneDNN fuses would turn into zero."""
    # No product of two rows is larger than that of their lengths. No pass is faster than a sum of squares.
    squares = (torch.dot(flat, flat) for flat in (x.reshape(-1), weight.reshape(-1)))
    return math.isfinite(math.prod(float(square) for square in squares))


def one_by_one(flops: int, dtype: torch.dtype) -> bool:
    """Return whether one oneDNN call per product of this size is faster than one batched call."""
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


@cache
def has_bf16_product() -> bool:
    """Return whether this PyTorch has a right product of bf16 operands with sums and results in fp32."""
    gemm = _gemm()
    if gemm is None:
        return False
    # What is called with a C signature that nobody checks has to show it: all sizes differ, so that a library
    # that reads them in another width, or another function of that name, gives other numbers.
    m, k, n = 3, 7, 5
    a, b = ((torch.arange(rows * gap) % 5 - 2.0).view(rows, gap) for rows, gap in ((m, k + 2), (n, k + 4)))
    out = torch.ones(m, n + 1)
    _call(gemm, a[:, :k].bfloat16(), b.bfloat16()[:, :k].t(), out[:, :n], 0.5, True)
    expected = torch.ones(m, n + 1)
    expected[:, :n] += 0.5 * (a[:, :k] @ b[:, :k].t())
    return torch.equal(out, expected)


def _bf16_product(a: Tensor, b: Tensor, out: Tensor, scale: float, add: bool) -> None:
    if b.dtype != torch.bfloat16 or out.dtype != torch.float32 or not has_bf16_product():
        raise TypeError(f"no product of {a.dtype} and {b.dtype} into {out.dtype} here: ask operand_dtype")
    _call(_gemm(), a, b, out, scale, add)


def _call(gemm: Any, a: Tensor, b: Tensor, out: Tensor, scale: float, add: bool) -> None:
    (*count, m, k), n = a.shape, b.shape[-1]
    # The library reads and writes where it is told to.
    if a.dim() not in (2, 3) or b.shape != (*count, k, n) or out.shape != (*count, m, n):
        raise ValueError(f"{[*a.shape]} times {[*b.shape]} does not give {[*out.shape]}")
    # It takes a gap between rows as large as a row at least, and as one of rows that do not overlap.
    if (n > 1 and out.stride(-1) != 1) or (m > 1 and out.stride(-2) < n):
        raise ValueError("a product of bf16 operands writes rows whose numbers are neighbours in memory")
    if not k and not add:
        out.zero_()
    if not a.numel() or not b.numel():
        return
    (a, a_order, a_gap), (b, b_order, b_gap) = _rows(a), _rows(b)
    gap = max(out.stride(-2), n) if m > 1 else n
    if max(m, n, k, a_gap, b_gap, gap) > _LARGEST_INT:
        raise ValueError(f"{[*a.shape]} times {[*b.shape]}: sizes or strides of 2^31 and more")
    at, steps = (a.data_ptr(), b.data_ptr(), out.data_ptr()), (0, 0, 0)
    if count:
        steps = (2 * a.stride(0), 2 * b.stride(0), 4 * out.stride(0))
    for i in range(*count or (1,)):
        p, q, r = (start + i * step for start, step in zip(at, steps, strict=True))
        gemm(_ROW_MAJOR, a_order, b_order, m, n, k, scale, p, a_gap, q, b_gap, float(add), r, gap)


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
    if not _on_x86() or not torch.backends.mkl.is_available():
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        function = library.cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    sizes = [ctypes.c_int] * 6
    address, gap, factor = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    function.argtypes = [*sizes, factor, address, gap, address, gap, factor, address, gap]
    function.restype = None
    return function
