"""Whole training steps with fused DSA and with Megatron's own: losses, tokens per second, memory, a trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks.gpu import job

STEPS = 6
_EXAMPLE = "--lr 1e-4 --min-lr 1e-4 --dsa-indexer-n-heads 16"
_DEEPSEEK = """
    --num-layers 1 --hidden-size 7168 --ffn-hidden-size 18432 --num-experts 0
    --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
    --micro-batch-size 1 --global-batch-size 1 --bf16 --lr 1e-5 --min-lr 1e-5
"""
_GLM = """
    --num-layers 1 --hidden-size 6144 --ffn-hidden-size 12288 --num-experts 0
    --q-lora-rank 2048 --kv-lora-rank 512 --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256
    --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
    --micro-batch-size 1 --global-batch-size 1 --bf16 --lr 1e-5 --min-lr 1e-5
"""
TINY = """
    --num-layers 1 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 2 --num-experts 0
    --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
    --seq-length 32 --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8
    --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --min-lr 1e-4
"""


@dataclass(frozen=True)
class Shape:
    """Model of a comparison, with relative bounds on the difference of both sides.

    An indexer with few heads gives many scores of exactly zero, and both sides select different ones of them.

    Attributes:
        flags: flags of the example.
        bounds: bound of each of a step's figures, by name.
    """

    flags: str
    bounds: Mapping[str, float]


FP32 = {"lm_loss": 1e-5, "indexer_loss": 5e-3, "grad_norm": 1e-3}
BF16 = {"lm_loss": 2e-3, "indexer_loss": 5e-2, "grad_norm": 5e-2}
SHAPES = {
    "example, fp32": Shape(_EXAMPLE, FP32),
    "example, bf16": Shape(f"{_EXAMPLE} --bf16", BF16),
    "GLM-5.2, 64 heads, 4096 tokens": Shape(f"{_GLM} --num-attention-heads 64 --seq-length 4096", BF16),
    "DeepSeek-V3.2, 64 heads, 4096 tokens": Shape(
        f"{_DEEPSEEK} --num-attention-heads 64 --seq-length 4096", BF16
    ),
    "DeepSeek-V3.2, 128 heads, 8192 tokens": Shape(
        f"{_DEEPSEEK} --num-attention-heads 128 --seq-length 8192", BF16
    ),
    # So short that launches take most of the time, for `pays_from`.
    **{
        f"GLM-5.2, 64 heads, {tokens} tokens": Shape(
            f"{_GLM} --num-attention-heads 64 --seq-length {tokens}", BF16
        )
        for tokens in (2048, 1024, 512)
    },
}
_TRACED = "DeepSeek-V3.2, 128 heads, 8192 tokens"
_LATER = "its time was not reached"
QUICK = {"tiny, fp32": Shape(TINY, FP32)}


def run(
    folder: Path | None,
    quick: bool = False,
    tell: Callable[[Any], None] = lambda found: None,
    shapes: Mapping[str, Shape] | None = None,
) -> dict[str, Any]:
    """Return each side's figures, or its error, and their comparison, by shape.

    Args:
        folder: folder for ``trace.json`` of a fused step of the largest shape, or of the last one without
            it. Its figures get ``kernels``. None for no trace.
        quick: a tiny model only.
        tell: callback that gets the figures so far.
        shapes: shapes to run; default: :data:`SHAPES`, or :data:`QUICK` if ``quick``.
    """
    if shapes is None:
        shapes = QUICK if quick else SHAPES
    figures: dict[str, Any] = {}
    # Run fused steps first: they matter most if the time runs out.
    for name, shape in shapes.items():
        traced = name == (_TRACED if _TRACED in shapes else list(shapes)[-1])
        trace = folder / "trace.json" if traced and folder is not None else None
        figures[name] = {"stock": _LATER, "fused": measure(f"--use-fused-dsa {shape.flags}", trace)}
        if isinstance(figures[name]["fused"], str):
            figures[name] = compared(figures[name], shape)
        tell(figures)
    for name, shape in shapes.items():
        sides = {"stock": measure(f"--no-use-fused-dsa {shape.flags}"), "fused": figures[name]["fused"]}
        figures[name] = compared(sides, shape)
        tell(figures)
    return figures


def compared(sides: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Return both sides and their ratios, or ``refused`` with the reason.

    Stock runs out of memory where it forms all pairs of rows and keys; that is a figure, not a failure.
    """
    stock, fused = sides["stock"], sides["fused"]
    comparison: dict[str, Any] = dict(sides)
    if isinstance(fused, str):
        return {**comparison, "refused": f"fused DSA: {fused}"}
    if isinstance(stock, str):
        return comparison if is_out_of_memory(stock) else {**comparison, "refused": f"stock: {stock}"}
    comparison["apart"] = {name: apart(fused[name], stock[name]) for name in shape.bounds}
    for name, bound in shape.bounds.items():
        if not comparison["apart"][name] <= bound:
            refused = f"{name} of fused DSA is {comparison['apart'][name]:.1e} from stock's, not {bound:.0e}"
            return {**comparison, "refused": refused}
    comparison["speedup"] = stock["step_ms"] / fused["step_ms"]
    if "peak_mib" in stock:
        comparison["peak_ratio"] = stock["peak_mib"] / fused["peak_mib"]
    return comparison


def pays_from(found: Mapping[str, Mapping[str, Any]]) -> dict[str, int | None]:
    """Return the number of tokens from which fused DSA is not slower than stock, by model and heads.

    None if it is slower at the largest number. Models that were compared at one number only are left out.

    Args:
        found: comparisons by shape, as :func:`run` returns them.
    """
    speedups: dict[str, dict[int, float]] = {}
    for name, comparison in found.items():
        match = re.fullmatch(r"(.+), (\d+) tokens", name)
        if match is not None and "speedup" in comparison:
            speedups.setdefault(match[1], {})[int(match[2])] = comparison["speedup"]
    least: dict[str, int | None] = {}
    for model, by_tokens in speedups.items():
        if len(by_tokens) > 1:
            fast = takewhile(lambda each: each[1] >= 1, sorted(by_tokens.items(), reverse=True))
            least[model] = min((tokens for tokens, _ in fast), default=None)
    return least


def measure(flags: str, trace: Path | None = None, deterministic: bool = False) -> dict[str, Any] | str:
    """Return the figures of :func:`benchmarks.gpu.job.train`, or its error."""
    try:
        return job.train(flags.split(), STEPS, trace, deterministic)
    except Exception as error:  # figures of other shapes are valid without these
        return f"{type(error).__name__}: {error}"[:300]


def is_out_of_memory(message: str) -> bool:
    """Return whether an error message says that a device has no memory left."""
    # CUDA's error has its own type; other accelerators say it in words only.
    return "OutOfMemory" in message or "out of memory" in message


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of two series, NaN if any difference is NaN."""
    differences = [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    return max(differences, key=lambda each: (each != each, each))
