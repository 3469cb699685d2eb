"""oneDNN's kernels for single blocks (brgemm), as PyTorch exports them for the code that its compiler writes.

Products of few rows spend more time on laying out the second operand, and on copying the result to where it
belongs, than on multiplying. These kernels take both as they are, add to what is there, and reach the
processor's full rate from 16 rows on.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.ops.cpu_threads import multiplies_alone

# Columns and summands of one call. The second operand's part stays in the second-level cache, and the
# kernels, which are generated for each shape at its first call, stay few.
_MOST_COLUMNS, _MOST_SUMMANDS = 512, 576
# at::native::cpublas::brgemm(m, n, k, ld_a, ld_b, ld_c, add, a, b, c, is_vnni), as the C++ ABI spells it.
_SYMBOLS = {
    torch.float32: "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb",
    torch.bfloat16: "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
}
# With them oneDNN uses less than the processor has; PyTorch's function ends the process where it then lacks
# the kernel for bf16.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# A kernel takes some 30 KiB and stays, in every thread: where lengths keep changing, libraries multiply in
# the end.
_MOST_SHAPES = 4096
# Of the distance between summands in memory; a kernel for more cannot be generated.
_MOST_DISTANCE = 1 << 30

_shapes: set[tuple[int, ...]] = set()


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether :func:`block_product` takes operands of this dtype here, and is the faster way.

    That is so on x86 processors other than Intel's, where MKL's products are as good or better, for bf16
    where the processor multiplies it, and where one thread does not keep others waiting.
    """
    if dtype not in _SYMBOLS or not torch.backends.mkldnn.enabled or not multiplies_alone():
        return False
    return len(_shapes) < _MOST_SHAPES and _kernel(dtype) is not None


def block_product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """``a @ b`` into ``out``, or added to it; of matrices, or of as many of each one after the other.

    Args:
        a: ``[m, k]`` or ``[g, m, k]``, neighbours in memory along ``k``; ``k`` is even in bf16.
        b: ``[k, n]`` or ``[g, k, n]``, likewise along ``n``; in bf16 ``[.., k / 2, n, 2]``, see
            :func:`pairs_of_rows`.
        out: ``[m, n]`` or ``[g, m, n]`` in fp32, likewise.
        add: whether to add.

    Raises:
        ValueError: shapes or dtypes do not fit.
        RuntimeError: oneDNN was switched off since :func:`has_kernel` was asked.
    """
    if a.dim() == 2:
        a, b, out = a[None], b[None], out[None]
    (count, m, k), n, together = a.shape, b.shape[2], b.shape[3] if b.dim() == 4 else 1
    if b.dtype != a.dtype or out.dtype != torch.float32 or together != 4 // a.element_size():
        raise ValueError(f"no kernel for {a.dtype} times {b.dtype} into {out.dtype}")
    if b.shape[:2] != (count, k // together) or k % together or out.shape != (count, m, n):
        raise ValueError(f"{[*a.shape]} times {[*b.shape]} does not give {[*out.shape]}")
    if not k and not add:
        out.zero_()
    if not count * m * n * k:
        return
    if not torch.backends.mkldnn.enabled:
        raise RuntimeError("oneDNN was switched off while an operator was computed")
    kernel, size = _kernel(a.dtype), a.element_size()
    # From row to row in memory, where each begins, and from matrix to matrix.
    gap_a, gap_b, gap_out = max(a.stride(1), k), b.stride(1) // together, max(out.stride(1), n)
    from_a, from_b, to = a.data_ptr(), b.data_ptr(), out.data_ptr()
    step_a, step_b, step_out = a.stride(0) * size, b.stride(0) * size, out.stride(0) * 4
    most_summands = max(min(_MOST_SUMMANDS, _MOST_DISTANCE // (gap_b * size) // 2 * 2), 2)
    calls = [
        (
            (m, min(_MOST_COLUMNS, n - column), min(most_summands, k - first), gap_a, gap_b, gap_out),
            add or first > 0,
            first * size,
            (first * gap_b + together * column) * size,
            column * 4,
        )
        for column in range(0, n, _MOST_COLUMNS)
        for first in range(0, k, most_summands)
    ]
    _shapes.update(shape for shape, *_ in calls)
    for _ in range(count):
        for shape, adds, at_a, at_b, at in calls:
            kernel(*shape, adds, from_a + at_a, from_b + at_b, to + at, together > 1)
        from_a, from_b, to = from_a + step_a, from_b + step_b, to + step_out


def pairs_of_rows(x: Tensor, pairs: Tensor, apart: Tensor) -> Tensor:
    """Lay out a second operand in bf16, with what is added up in one instruction next to each other.

    Args:
        x: ``[k, n]`` bf16, its columns neighbours in memory.
        pairs: ``[(k + 1) / 2, n]`` int32, where to.
        apart: ``[k / 2, n]`` int32, overwritten.

    Returns:
        ``[(k + 1) / 2, n, 2]`` bf16, in ``pairs``; the last row of an odd number has a zero beside it.
    """
    # As integers: PyTorch has no fast copy that interleaves.
    numbers = x.view(torch.int16)
    pairs.copy_(numbers[0::2]).bitwise_and_(0xFFFF)
    pairs[: len(apart)].add_(apart.copy_(numbers[1::2]), alpha=1 << 16)
    return pairs.view(torch.bfloat16).view(*pairs.shape, 2)


@cache
def mkl_knows_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether there is MKL, and the processor is Intel's: on others it uses half of the vector width."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        return "GenuineIntel" in cpuinfo.read_text()
    except OSError:
        return False


def processor_has_bf16() -> bool:
    """Asked of PyTorch, whose releases differ in what they call it."""
    asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in asked if hasattr(torch.cpu, name))


def on_x86() -> bool:
    """Whether this is an x86-64 processor."""
    return platform.machine().lower() in ("x86_64", "amd64")


def of_torch(name: str) -> Any:
    """A function in the library that PyTorch has loaded, or None."""
    try:
        return getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), name)
    except (OSError, AttributeError):
        return None


@cache
def _kernel(dtype: torch.dtype) -> Any:
    if not on_x86() or mkl_knows_processor() or not torch.backends.mkldnn.is_available():
        return None
    if any(name in os.environ for name in _LIMITS):
        return None
    if dtype == torch.bfloat16 and not processor_has_bf16():
        return None
    function = of_torch(_SYMBOLS[dtype])
    if function is not None:
        size, address, flag = ctypes.c_int64, ctypes.c_void_p, ctypes.c_bool
        function.argtypes = [*[size] * 6, flag, address, address, address, flag]
        function.restype = None
    return function
