"""Shared by the CPU backends: whether products take bf16 operands as they are, or widened to fp32.

Which is faster the processor's flags do not say: on one with AVX512-BF16 and without AMX, the example trained
at a third of its speed in fp32 when bf16 stayed. So both are measured, once in a process, on a product of
each kind that the operators have. Sums are in fp32 either way, in another order, and widened probabilities
are not rounded: results differ by rounding. Hence nothing is measured where they must not depend on it:

* under ``torch.use_deterministic_algorithms``, operands are widened, on every processor;
* in a job of several ranks they are too, unless :func:`agree` has found one answer for all of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist

from mindspeed_dsa import log
from mindspeed_dsa.ops.cpu.products import compute_dtype, has_bf16_product, product
from mindspeed_dsa.ops.cpu.threads import share_out, worker_count

Way = Literal["auto", "native", "widened"]

_log = log.get("ops")

# From so many rows on a product is one of many.
_MANY_ROWS = 64
# Products at once, rows, dimensions, keys: chunks of rows by head, and the heads of rows whose keys were
# gathered, in DeepSeek-V3.2's widths.
_SHAPES = {"many rows": (1, 256, 192, 1024), "few rows": (8, 16, 576, 512)}
_Kind = Literal["many rows", "few rows"]
_ROUNDS = 5
# How much faster bf16 must be to be taken: what is nearly a tie keeps the more precise way.
_WORTH = 1.2

Times = tuple[float, float]
"""Seconds of the same work with bf16 operands, and with widened ones."""

_asked: Way = "auto"
_agreed: dict[str, Times] | None = None
_measured: dict[str, Times] = {}
_lock = threading.Lock()


def operand_dtype(dtype: torch.dtype, rows: float = math.inf) -> torch.dtype:
    """In what products take their operands: bf16 stays where that is faster, else fp32 or fp64.

    Asked before work is shared out, so that all of an operator's threads have one answer.

    Args:
        dtype: of the numbers.
        rows: of the first operand.
    """
    if dtype != torch.bfloat16:
        return compute_dtype(dtype)
    kind: _Kind = "many rows" if rows >= _MANY_ROWS else "few rows"
    native, why = _answer(kind)
    way = "as they are" if native else "widened to fp32"
    _log.info("bf16 operands of products with %s are multiplied %s: %s", kind, way, why, once=True)
    return dtype if native else torch.float32


def use(way: str) -> None:
    """Choose for this process; ``auto`` measures.

    Args:
        way: one of :data:`Way`; ``native`` multiplies bf16 operands as they are, ``widened`` in fp32.

    Raises:
        ValueError: there is no such way, or this PyTorch cannot go it.
    """
    global _asked, _agreed
    if way not in get_args(Way):
        raise ValueError(f"bf16 on CPUs: no way is called {way!r}; choose one of {', '.join(get_args(Way))}")
    if way == "native" and (problem := why_not_native()):
        raise ValueError(problem)
    _asked, _agreed = cast(Way, way), None


def why_not_native() -> str:
    """Why bf16 operands cannot be multiplied as they are here, or nothing."""
    if has_bf16_product():
        return ""
    return (
        "this PyTorch has no product of bf16 operands with sums in fp32 (cblas_gemm_bf16bf16f32 of MKL, x86 "
        "only): choose 'widened', or 'auto'"
    )


def agree() -> None:
    """Measure on every rank and take the same on all of them: a collective call of the default group.

    Only what :func:`use` left open is measured. The slowest rank's figures count.
    """
    global _agreed
    if _asked != "auto" or torch.are_deterministic_algorithms_enabled() or _ranks() == 1:
        return
    times = torch.tensor([_times(kind) for kind in _SHAPES], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    _agreed = {
        kind: (native, widened) for kind, (native, widened) in zip(_SHAPES, times.tolist(), strict=True)
    }


def _answer(kind: _Kind) -> tuple[bool, str]:
    """Return whether bf16 stays, and why."""
    if _asked != "auto":
        return _asked == "native", "as asked for"
    if not has_bf16_product():
        return False, "this PyTorch has no product of bf16 operands with sums in fp32"
    if torch.are_deterministic_algorithms_enabled():
        return False, "deterministic algorithms are on, which rule out a measured choice"
    if _agreed is not None:
        native, widened = _agreed[kind]
    elif _ranks() > 1:
        return False, "the ranks of this job have not agreed on a measured choice"
    else:
        native, widened = _times(kind)
    return native * _WORTH <= widened, f"{1e3 * native:.2f} ms, and {1e3 * widened:.2f} ms widened"


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _times(kind: str) -> Times:
    with _lock:
        if kind not in _measured:
            _measured[kind] = _measure(kind) if has_bf16_product() else (math.inf, 0.0)
        return _measured[kind]


def _measure(kind: str) -> Times:
    """The scores of some rows, and the sum of values with what is rounded between them, in every thread."""
    count, rows, dim, keys = _SHAPES[kind]

    def of_thread(_: Sequence[int]) -> Times:
        best = []
        for operand in (torch.bfloat16, torch.float32):
            query, key, weights = (
                torch.full(shape, 0.5, dtype=operand)
                for shape in ((count, rows, dim), (count, keys, dim), (count, rows, keys))
            )
            scores, out = torch.empty(count, rows, keys), torch.empty(count, rows, dim)
            work = partial(_attend, query, key, weights, scores, out)
            work()
            best.append(min(_seconds(work) for _ in range(_ROUNDS)))
        return best[0], best[1]

    times = share_out(range(worker_count()), of_thread)
    return max(native for native, _ in times), max(widened for _, widened in times)


def _attend(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, scores: torch.Tensor, out: torch.Tensor
) -> None:
    product(query, key.mT, scores)
    if weights.dtype != scores.dtype:
        weights.copy_(scores)
    product(weights, key, out)


def _seconds(work: partial[None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
