"""Whole training steps with fused DSA and with Megatron's own: losses, tokens per second, memory, a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """A model, and how far both sides may be apart, relatively.

    Few heads of an indexer give many scores of exactly zero, and both sides choose others of them.

    Attributes:
        flags: of the example.
        bounds: of each step's figures, by their names.
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
}
_LATER = "its time was not reached"
QUICK = {"tiny, fp32": Shape(TINY, FP32)}


def run(
    folder: Path | None,
    quick: bool = False,
    tell: Callable[[Any], None] = lambda found: None,
    shapes: Mapping[str, Shape] | None = None,
) -> dict[str, Any]:
    """By shape: each side's figures, or why it has none, and how they compare.

    Args:
        folder: for ``trace.json``, of the last shape's step with fused DSA; ``kernels`` are in its figures.
            None for no trace.
        quick: a tiny model only.
        tell: called with what is found so far.
        shapes: instead of a GPU's.
    """
    if shapes is None:
        shapes = QUICK if quick else SHAPES
    found: dict[str, Any] = {}
    # Fused steps first: they are what is wanted where the time runs out.
    for name, shape in shapes.items():
        last = name == list(shapes)[-1]
        trace = folder / "trace.json" if last and folder is not None else None
        found[name] = {"stock": _LATER, "fused": measure(f"--use-fused-dsa {shape.flags}", trace)}
        if isinstance(found[name]["fused"], str):
            found[name] = compared(found[name], shape)
        tell(found)
    for name, shape in shapes.items():
        sides = {"stock": measure(f"--no-use-fused-dsa {shape.flags}"), "fused": found[name]["fused"]}
        found[name] = compared(sides, shape)
        tell(found)
    return found


def compared(sides: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Both sides and the ratios; ``refused`` says what is wrong, and then there are no ratios.

    Stock does not fit where it forms all pairs of rows and keys; that is a figure, not a failure.
    """
    stock, fused = sides["stock"], sides["fused"]
    found: dict[str, Any] = dict(sides)
    if isinstance(fused, str):
        return {**found, "refused": f"fused DSA: {fused}"}
    if isinstance(stock, str):
        return found if is_out_of_memory(stock) else {**found, "refused": f"stock: {stock}"}
    found["apart"] = {name: apart(fused[name], stock[name]) for name in shape.bounds}
    for name, bound in shape.bounds.items():
        if not found["apart"][name] <= bound:
            refused = f"{name} of fused DSA is {found['apart'][name]:.1e} from stock's, not {bound:.0e}"
            return {**found, "refused": refused}
    found["speedup"] = stock["step_ms"] / fused["step_ms"]
    if "peak_mib" in stock:
        found["peak_ratio"] = stock["peak_mib"] / fused["peak_mib"]
    return found


def measure(flags: str, trace: Path | None = None, deterministic: bool = False) -> dict[str, Any] | str:
    """Figures of :func:`benchmarks.gpu.job.train`, or the error that ended it."""
    try:
        return job.train(flags.split(), STEPS, trace, deterministic)
    except Exception as error:  # the figures of the others are worth as much without these
        return f"{type(error).__name__}: {error}"[:300]


def is_out_of_memory(message: str) -> bool:
    """Whether a device has no memory left, by the error's type or, of other accelerators, its words."""
    return "OutOfMemory" in message or "out of memory" in message


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest relative difference of two series; NaN if there is one."""
    differences = [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    return max(differences, key=lambda each: (each != each, each))
