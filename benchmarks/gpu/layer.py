"""Whole training steps with fused DSA and with Megatron's own: losses, tokens per second, peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STEPS = 7
_DEEPSEEK = """
    --num-layers 1 --hidden-size 7168 --ffn-hidden-size 18432 --num-experts 0
    --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
    --micro-batch-size 1 --global-batch-size 1 --bf16
"""
_TINY = """
    --num-layers 1 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 2 --num-experts 0
    --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
    --seq-length 32 --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8
    --micro-batch-size 1 --global-batch-size 1
"""


@dataclass(frozen=True)
class Shape:
    """A model, and how far the losses of both sides may be apart, relatively.

    Attributes:
        flags: of the example.
        bound: of each step's language model loss.
        indexer_bound: of each step's indexer loss.
    """

    flags: str
    bound: float
    indexer_bound: float


SHAPES = {
    "example, fp32": Shape("", 1e-5, 1e-3),
    "example, bf16": Shape("--bf16", 2e-3, 5e-2),
    "DeepSeek-V3.2, 64 heads, 4096 tokens": Shape(
        f"{_DEEPSEEK} --num-attention-heads 64 --seq-length 4096", 5e-3, 5e-2
    ),
    "DeepSeek-V3.2, 128 heads, 8192 tokens": Shape(
        f"{_DEEPSEEK} --num-attention-heads 128 --seq-length 8192", 5e-3, 5e-2
    ),
}
QUICK = {"tiny, fp32": Shape(_TINY, 1e-5, 1e-3)}
SIDES = {"stock": "--no-use-fused-dsa", "fused": "--use-fused-dsa"}


def run(quick: bool = False) -> dict[str, Any]:
    """By shape: each side's figures, or why it has none, and how they compare."""
    return {
        name: compared({side: measure(flag, shape.flags) for side, flag in SIDES.items()}, shape)
        for name, shape in (QUICK if quick else SHAPES).items()
    }


def compared(sides: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Both sides and the ratios; ``refused`` says what is wrong, and then there are no ratios.

    Stock does not fit where it forms all pairs of rows and keys; that is a figure, not a failure.
    """
    stock, fused = sides["stock"], sides["fused"]
    found: dict[str, Any] = dict(sides)
    if isinstance(fused, str):
        return {**found, "refused": f"fused DSA: {fused}"}
    if isinstance(stock, str):
        return found if "OutOfMemory" in stock else {**found, "refused": f"stock: {stock}"}
    apart = {name: _apart(fused[name], stock[name]) for name in ("lm_loss", "indexer_loss")}
    found["apart"] = apart
    for name, bound in (("lm_loss", shape.bound), ("indexer_loss", shape.indexer_bound)):
        if not apart[name] <= bound:
            return {
                **found,
                "refused": f"{name} of fused DSA is {apart[name]:.1e} from stock's, not {bound:.0e}",
            }
    found["speedup"] = stock["step_ms"] / fused["step_ms"]
    if "peak_mib" in stock:
        found["peak_ratio"] = stock["peak_mib"] / fused["peak_mib"]
    return found


def trace(file: Path, quick: bool = False) -> dict[str, Any]:
    """A trace of the last shape's fused step, for Perfetto, and its kernels."""
    shape = list((QUICK if quick else SHAPES).values())[-1]
    found = measure(SIDES["fused"], shape.flags, str(file))
    return {"error": found} if isinstance(found, str) else {"file": file.name, "kernels": found["kernels"]}


def measure(side: str, flags: str, trace: str = "") -> dict[str, Any] | str:
    """Figures of :func:`benchmarks.gpu.job.train` in a process of its own, or the error that ended it."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.job", str(STEPS), trace, side, *flags.split()],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "0")},
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stderr[-4000:])
    if done.returncode:
        return _error(done.stderr.splitlines())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _error(lines: Sequence[str]) -> str:
    """The line that names the exception: the last one that is no note of a warning or of torch's own."""
    named = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith(" ")]
    return (named or list(lines) or ["no message"])[-1][:300]


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
