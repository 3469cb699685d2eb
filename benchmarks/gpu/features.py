"""Features with GPU-specific code or streams: a few steps with and without the feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from benchmarks.gpu.layer import BF16, TINY, apart, measure

MODEL = """
    --bf16 --num-layers 3 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 16 --seq-length 512
    --q-lora-rank 256 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 64 --dsa-indexer-topk 128
    --num-experts 8 --moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 256
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-4 --min-lr 1e-4
"""
_FUSED = "--use-fused-dsa"
_SHARDED = "--use-fused-dsa --use-distributed-optimizer"
# Plain PyTorch operators replace stock Megatron where it lacks a function.
_PLAIN = "--dsa-backend chunked"


@dataclass(frozen=True)
class Case:
    """Two jobs that must train alike.

    Attributes:
        on: feature's flags.
        off: flags of both jobs.
        instead: flags of the job without the feature only.
        bounds: relative bounds of each step's figures; empty: bitwise equality, weights included.
    """

    on: str
    off: str = _FUSED
    instead: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)


CASES = {
    "swap-attention": Case("--swap-attention --swap-attention-min-bytes 65536"),
    "recompute-norm": Case("--recompute-norm"),
    "recompute-activation-function": Case("--recompute-activation-function"),
    "full recompute": Case(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "virtual-optimizer": Case("--virtual-optimizer all"),
    "swap-optimizer": Case("--swap-optimizer", _SHARDED),
    "reuse-fp32-param": Case("--reuse-fp32-param", _SHARDED),
    "two-streams": Case("--two-streams --two-streams-min-tokens 0"),
    "two-streams, swap-attention": Case(
        "--two-streams --two-streams-min-tokens 0",
        f"{_FUSED} --swap-attention --swap-attention-min-bytes 65536",
    ),
    "fused-operators": Case("--fused-operators all", bounds=BF16),
    "fsdp2": Case("--use-torch-fsdp2", bounds=BF16),
    "moe-grouped-gemm": Case("--moe-grouped-gemm", bounds=BF16),
    "moe-permute-fusion": Case("--moe-permute-fusion", bounds=BF16),
    "dsa-fuse-kl-in-backward": Case("--dsa-fuse-kl-in-backward", bounds=BF16),
    "fused-dsa": Case(_FUSED, "", "--no-use-fused-dsa", BF16),
    "fused-dsa, MTP": Case(_FUSED, "--mtp-num-layers 1", "--no-use-fused-dsa", BF16),
    "fused-dsa, dense stage": Case("", f"{_FUSED} --dsa-stage warmup", _PLAIN, BF16),
    "fused-dsa, packs": Case("", f"{_FUSED} --pack-documents --micro-batch-size 1", _PLAIN, BF16),
}
QUICK = ("fused-dsa",)
COMPILED = {"compile-regions": Case("--compile-regions", bounds=BF16)}
"""Cases that compile; they cannot be compared where compilation is off."""
_FIGURES = ("lm_loss", "indexer_loss", "grad_norm")


def run(
    quick: bool = False,
    tell: Callable[[Any], None] = lambda found: None,
    model: str | None = None,
    cases: Mapping[str, Case] | None = None,
) -> dict[str, Any]:
    """Return both jobs' memory and their step time ratio by case; ``refused`` is a failure's reason.

    Args:
        quick: one case, on a tiny model.
        tell: callback that gets the figures so far.
        model: model's flags; default: :data:`MODEL`, or a tiny one if ``quick``.
        cases: cases to run; default: :data:`CASES`, or :data:`QUICK` if ``quick``.
    """
    if model is None:
        model = f"{TINY} --bf16" if quick else MODEL
    if cases is None:
        cases = {name: CASES[name] for name in (QUICK if quick else CASES)}
    train = cache(partial(measure, deterministic=True))
    figures: dict[str, Any] = {}
    for name, case in cases.items():
        # Normalize the spelling, so that cases with the same job run it once.
        off, on = (" ".join(f"{model} {case.off} {flags}".split()) for flags in (case.instead, case.on))
        figures[name] = compared(train(off), train(on), case)
        tell(figures)
    return figures


def compared(off: dict[str, Any] | str, on: dict[str, Any] | str, case: Case) -> dict[str, Any]:
    """Return the comparison of both jobs, or the reason why they cannot be compared."""
    for what, figures in (("without it", off), ("with it", on)):
        if isinstance(figures, str):
            return {"refused": f"{what}: {figures}"}
    assert isinstance(off, dict)
    assert isinstance(on, dict)
    seen = [name for name in _FIGURES if all(each is not None for each in (*off[name], *on[name]))]
    distance = {name: apart(on[name], off[name]) for name in seen}
    comparison: dict[str, Any] = {"apart": distance, "step_ratio": on["step_ms"] / off["step_ms"]}
    memory = [name for name in ("peak_mib", "rest_mib") if name in off]
    comparison |= {name: {"off": off[name], "on": on[name]} for name in memory}
    # A feature that changes neither memory nor operator calls nor the stream of any work has done nothing.
    if all(on[name] == off[name] for name in ("calls", "started", *memory)):
        return {**comparison, "refused": "memory and operators are as without it: it did nothing"}
    if case.bounds:
        for name in seen:
            if not distance[name] <= case.bounds[name]:
                refused = f"{name} is {distance[name]:.1e} from that without it, not {case.bounds[name]:.0e}"
                return {**comparison, "refused": refused}
    elif any(on[name] != off[name] for name in (*_FIGURES, "weights")):
        return {**comparison, "refused": f"it trains otherwise than without: {distance}"}
    return comparison
