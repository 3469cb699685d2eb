"""Features with a way of their own on a GPU, on its streams: a few steps without and with each."""

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
# Operators in plain PyTorch stand for stock where it lacks something.
_PLAIN = "--dsa-backend chunked"


@dataclass(frozen=True)
class Case:
    """Two jobs that must train alike.

    Attributes:
        on: flags of the feature.
        off: flags of both jobs.
        instead: flags of the job without the feature only.
        bounds: relative ones for each step's figures; empty: the same bits, those of the weights included.
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
"""Cases that compile, and so cannot be compared where compilation is off."""
_FIGURES = ("lm_loss", "indexer_loss", "grad_norm")


def run(
    quick: bool = False,
    tell: Callable[[Any], None] = lambda found: None,
    model: str | None = None,
    cases: Mapping[str, Case] | None = None,
) -> dict[str, Any]:
    """By case: both jobs' memory and the ratio of their steps; ``refused`` says what is wrong.

    Args:
        quick: one of them, on a tiny model.
        tell: called with what is found so far.
        model: flags of the model, instead of a GPU's.
        cases: instead of a GPU's.
    """
    if model is None:
        model = f"{TINY} --bf16" if quick else MODEL
    if cases is None:
        cases = {name: CASES[name] for name in (QUICK if quick else CASES)}
    train = cache(partial(measure, deterministic=True))
    found: dict[str, Any] = {}
    for name, case in cases.items():
        # In one spelling, so that jobs of several cases run once.
        off, on = (" ".join(f"{model} {case.off} {flags}".split()) for flags in (case.instead, case.on))
        found[name] = compared(train(off), train(on), case)
        tell(found)
    return found


def compared(off: dict[str, Any] | str, on: dict[str, Any] | str, case: Case) -> dict[str, Any]:
    """What is reported of both jobs, or why they cannot be compared.

    A feature that changes neither memory nor the operators that are called, nor the stream of any work, has
    done nothing.
    """
    for what, figures in (("without it", off), ("with it", on)):
        if isinstance(figures, str):
            return {"refused": f"{what}: {figures}"}
    assert isinstance(off, dict)
    assert isinstance(on, dict)
    seen = [name for name in _FIGURES if all(each is not None for each in (*off[name], *on[name]))]
    distance = {name: apart(on[name], off[name]) for name in seen}
    found: dict[str, Any] = {"apart": distance, "step_ratio": on["step_ms"] / off["step_ms"]}
    memory = [name for name in ("peak_mib", "rest_mib") if name in off]
    found |= {name: {"off": off[name], "on": on[name]} for name in memory}
    if all(on[name] == off[name] for name in ("calls", "started", *memory)):
        return {**found, "refused": "memory and operators are as without it: it did nothing"}
    if case.bounds:
        for name in seen:
            if not distance[name] <= case.bounds[name]:
                refused = f"{name} is {distance[name]:.1e} from that without it, not {case.bounds[name]:.0e}"
                return {**found, "refused": refused}
    elif any(on[name] != off[name] for name in (*_FIGURES, "weights")):
        return {**found, "refused": f"it trains otherwise than without: {distance}"}
    return found
