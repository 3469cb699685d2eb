"""Training steps on an NPU: a layer with Megatron's own DSA and with the fused one, features off and on."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from benchmarks.gpu import features, layer
from benchmarks.gpu.features import Case
from benchmarks.gpu.layer import BF16, Shape
from benchmarks.parts import Tell

_DEEPSEEK = """
    --num-attention-heads 128 --seq-length 4096 --hidden-size 7168 --ffn-hidden-size 18432 --q-lora-rank 1536
    --qk-head-dim 128 --v-head-dim 128 --dsa-indexer-n-heads 64
"""
_GLM = """
    --num-attention-heads 64 --seq-length 4096 --hidden-size 6144 --ffn-hidden-size 12288 --q-lora-rank 2048
    --qk-head-dim 192 --v-head-dim 256 --dsa-indexer-n-heads 32
"""
_ONE_LAYER = """
    --bf16 --num-layers 1 --num-experts 0 --kv-lora-rank 512 --qk-pos-emb-head-dim 64
    --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 --micro-batch-size 1 --global-batch-size 1
    --lr 1e-5 --min-lr 1e-5
"""
SHAPES = {
    "DeepSeek-V3.2, 4096 tokens": Shape(f"{_ONE_LAYER} {_DEEPSEEK}", BF16),
    "GLM-5, 4096 tokens": Shape(f"{_ONE_LAYER} {_GLM}", BF16),
}
# Widths that the operators take. The sparse loss needs more heads, and is computed in PyTorch.
TINY = """
    --bf16 --num-layers 1 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 2
    --q-lora-rank 32 --kv-lora-rank 512 --qk-head-dim 16 --qk-pos-emb-head-dim 64 --v-head-dim 16
    --seq-length 1032 --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 128 --dsa-indexer-topk 1024
    --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --min-lr 1e-4 --use-dsa-absorb on
"""
QUICK = {"tiny": Shape(f"{TINY} --num-experts 0", BF16)}

# Small, with widths that the operators take.
MODEL = """
    --bf16 --num-layers 3 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 64
    --seq-length 2048 --q-lora-rank 512 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 1024
    --num-experts 8 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
    --micro-batch-size 1 --global-batch-size 2 --lr 1e-4 --min-lr 1e-4
"""
_SHARDED = "--use-fused-dsa --use-distributed-optimizer"
_PLAIN_ADAM = "--no-fused-adam"
_SMALL = "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb"
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CASES = {
    "swap-attention": Case("--swap-attention --swap-attention-min-bytes 65536"),
    "recompute-norm": Case("--recompute-norm"),
    "recompute-activation-function": Case("--recompute-activation-function"),
    "full recompute": Case(_RECOMPUTED),
    # Neither has fused Adam, which is on otherwise; a virtual optimizer has torch_npu's operator for Adam.
    "virtual-optimizer": Case("--virtual-optimizer all", instead=_PLAIN_ADAM, bounds=BF16),
    "swap-optimizer": Case("--swap-optimizer", _SHARDED, _PLAIN_ADAM),
    "reuse-fp32-param": Case("--reuse-fp32-param", _SHARDED),
    "moe-grouped-gemm": Case("--moe-grouped-gemm", bounds=BF16),
    "moe-permute-fusion": Case("--moe-permute-fusion", bounds=BF16),
    "fused RMSNorm, SwiGLU, rotary": Case(_SMALL, bounds=BF16),
}
QUICK_CASES = {"full recompute": Case(_RECOMPUTED)}
_SHOWN = 25


def layers(quick: bool, tell: Tell) -> dict[str, Any]:
    """Return by model the results of :func:`benchmarks.gpu.layer.compared`."""
    return layer.run(None, quick, tell, QUICK if quick else SHAPES)


def memory(quick: bool, tell: Tell) -> dict[str, Any]:
    """Return by feature the results of :func:`benchmarks.gpu.features.compared`; sums have a fixed order.

    The sparse loss and the indexer's gradient are then PyTorch's: torch_npu's have no fixed order.
    """
    return features.run(
        quick, tell, f"{TINY} --num-experts 0" if quick else MODEL, QUICK_CASES if quick else CASES
    )


def profiled(folder: Path, quick: bool) -> dict[str, Any]:
    """Return time on the device by kind of operator and core in a few fused steps, longest first.

    Args:
        folder: folder for torch_npu's profile, which MindStudio Insight opens.
        quick: a tiny model.
    """
    import torch_npu

    shape = next(iter((QUICK if quick else SHAPES).values()))
    written = folder / "profile"
    profiler = torch_npu.profiler
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        on_trace_ready=profiler.tensorboard_trace_handler(str(written)),
    ):
        figures = layer.measure(f"--use-fused-dsa {shape.flags}")
    if isinstance(figures, str):
        return {"error": figures}
    tables = sorted(written.glob("**/op_statistic.csv"))
    return {"kernels": operators_of(tables[-1])} if tables else {"error": f"no op_statistic.csv in {written}"}


def operators_of(table: Path) -> dict[str, Any]:
    """Return milliseconds and calls of each kind of operator, with the cores that ran it, longest first.

    Args:
        table: ``op_statistic.csv`` of torch_npu's profiler.
    """
    with table.open(encoding="utf-8-sig", newline="") as lines:
        rows = [{name.strip(): value for name, value in row.items()} for row in csv.DictReader(lines)]
    rows.sort(key=lambda row: -float(row["Total Time(us)"]))
    return {
        f"{row['OP Type']} on {row['Core Type']}": {
            "ms": float(row["Total Time(us)"]) / 1e3,
            "launches": int(row["Count"]),
        }
        for row in rows[:_SHOWN]
    }
