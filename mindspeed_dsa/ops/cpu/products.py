"""Matmuls on CPUs with the faster of MKL and oneDNN, shared by the CPU backends.

* fp32: PyTorch's own products use the BLAS that it was built with. On x86 this is MKL, which uses half of the
  vector width on processors that are not Intel's. oneDNN, which PyTorch also contains, uses all of it there.
  On Intel's processors MKL takes half of oneDNN's time for products as small as these.
* bf16 and fp16: operands are widened to fp32 first. PyTorch's own products would round their results to
  16 bits, too coarse for scores.
"""

from __future__ import annotations

import math
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.ops.chunks import scratch_product

# A loop of oneDNN calls beats one batched call from this much work per product on, and up to this many
# threads.
_LOOP_MIN_FLOPS = 4_000_000
_LOOP_MAX_THREADS = 4


@cache
def mkl_knows_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether MKL is available and the processor is Intel's; MKL is slow on others."""
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
    """Return the dtype of products, sums and intermediate results: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0, add: bool = False) -> None:
    """Write ``scale * (a @ b)`` into ``out``, or add it.

    Args:
        a: ``[m, k]`` or ``[g, m, k]``, in fp32 or fp64.
        b: ``[k, n]`` or ``[g, k, n]``, in the same dtype.
        out: ``[m, n]`` or ``[g, m, n]`` in :func:`compute_dtype`.
        scale: factor of the product.
        add: whether to add to ``out`` instead of overwriting it.
    """
    if a.dim() == 3 and len(a) == 1:
        a, b, out = a[0], b[0], out[0]
    if one_by_one(2 * a.shape[-2] * a.shape[-1] * b.shape[-1], a.dtype):
        pairs = zip(a, b, out, strict=True) if a.dim() == 3 else ((a, b, out),)
        for one, other, result in pairs:
            _onednn_product(one, other, result, scale, add)
    elif a.dim() == 3 and add and not out.is_contiguous():
        # baddbmm into a strided output runs one product after another, each on all threads: far slower.
        out.add_(torch.bmm(a, b), alpha=scale)  # [g, m, n]
    elif a.dim() == 3:
        torch.baddbmm(out, a, b, beta=float(add), alpha=scale, out=out)
    else:
        torch.addmm(out, a, b, beta=float(add), alpha=scale, out=out)


def linear(x: Tensor, weight: Tensor, relu: bool = False) -> Tensor:
    """Return ``x @ weight.T``, optionally clamped at zero: ``[m, k]``, ``[n, k]`` -> ``[m, n]``."""
    # For weights with gaps between rows oneDNN has only its slow reference kernel.
    dense = weight.is_contiguous() or weight.t().is_contiguous()
    if dense and _onednn_takes(x.dtype):
        fused = relu and _stays_finite(x, weight)
        out = _LINEAR(x, weight, None, "relu" if fused else "none", [], "")
        return out.relu_() if relu and not fused else out
    out = scratch_product(x, weight.t())
    return out.relu_() if relu else out


def _stays_finite(x: Tensor, weight: Tensor) -> bool:
    """Return whether no dot product can be NaN; oneDNN's fused relu would turn NaN into zero."""
    # By Cauchy-Schwarz no scalar product exceeds the product of the lengths. A sum of squares is the fastest
    # pass.
    squares = (torch.dot(flat, flat) for flat in (x.reshape(-1), weight.reshape(-1)))
    return math.isfinite(math.prod(float(square) for square in squares))


def one_by_one(flops: int, dtype: torch.dtype) -> bool:
    """Return whether a loop of oneDNN matmuls of this size is faster than one batched matmul."""
    return flops >= _LOOP_MIN_FLOPS and torch.get_num_threads() <= _LOOP_MAX_THREADS and _onednn_takes(dtype)


def _onednn_product(a: Tensor, b: Tensor, out: Tensor, scale: float, add: bool) -> None:
    # oneDNN repacks the second operand on every call, so the smaller operand goes there if its layout allows.
    result = linear(b.t(), a).t() if a.shape[0] < b.shape[1] and b.t().is_contiguous() else linear(a, b.t())
    if add:
        out.add_(result, alpha=scale)
    elif scale != 1:
        torch.mul(result, scale, out=out)
    else:
        out.copy_(result)


def _onednn_takes(dtype: torch.dtype) -> bool:
    if _LINEAR is None or _MKL_IS_FAST or dtype != torch.float32:
        return False
    return bool(torch.backends.mkldnn.enabled)
