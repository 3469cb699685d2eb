"""A job with experts, and records of its loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_dsa.runs import expert_load, metrics
from mindspeed_dsa.runs.expert_load import LayerLoad

LAYERS, EXPERTS, RANKS, HOT = 12, 8, 4, 5
MODEL = (
    "pretrain_gpt.py --num-layers 12 --hidden-size 256 --num-attention-heads 8 --vocab-size 4096 --swiglu "
    "--seq-length 512 --micro-batch-size 1 --global-batch-size 64 --num-experts 8 --moe-ffn-hidden-size 512 "
    "--moe-router-topk 2 --disable-bias-linear --moe-token-dispatcher-type alltoall "
    "--untie-embeddings-and-output-weights --transformer-impl local"
)
JOB = f"{MODEL} --pipeline-model-parallel-size 4 --expert-model-parallel-size 4"
EVEN = [100] * EXPERTS
ONE = [800] + [0] * (EXPERTS - 1)
"""Tokens by expert: the same for all, and all for the first."""


def by_rank(experts: Sequence[int], ranks: int = RANKS) -> list[int]:
    """Return the tokens of each rank, with experts in order."""
    held = len(experts) // ranks
    return [sum(experts[rank * held : (rank + 1) * held]) for rank in range(ranks)]


def write(
    folder: Path, layers: Mapping[int, Sequence[int]], steps: int = 1, stages: int = 4, microbatches: int = 1
) -> Path:
    """Write the records of a job whose layers have the given tokens by expert; return the folder."""
    first, count = min(layers), len(layers)
    for step in range(1, steps + 1):
        loads = [
            LayerLoad(layer, (layer - first) * stages // count, experts, [by_rank(experts)], microbatches)
            for layer, experts in sorted(layers.items())
        ]
        metrics.append(folder / expert_load.FILE, expert_load.record(step, loads))
    return folder


def hot(folder: Path, layers: int = LAYERS, microbatches: int = 1) -> Path:
    """Write records in which all tokens of layer 5 go to the first expert."""
    loads = {layer: ONE if layer == HOT else EVEN for layer in range(1, layers + 1)}
    return write(folder, loads, microbatches=microbatches)
