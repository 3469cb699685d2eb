"""Main job with fused DSA, tensor and sequence parallel, over the link: stock and overlapped."""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.tp_overlap.cells import slowest, way

_EXAMPLES = str(Path(__file__).parents[2] / "examples")
_MODEL = """
    --num-layers 2 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 --seq-length 512
    --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64
    --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 64
    --num-experts 0 --make-vocab-size-divisible-by 64 --micro-batch-size 4 --global-batch-size 4
"""
_QUICK = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32
    --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
    --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8
    --num-experts 0 --make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 2
"""
_TRAINING = """
    --tensor-model-parallel-size 2 --sequence-parallel --lr 1e-4 --min-lr 1e-4 --lr-warmup-iters 0
    --lr-decay-style constant --eval-iters 0 --save-interval 0 --no-save --no-plot --no-tensorboard
    --no-deterministic-mode
"""
WAYS = ("stock", "overlapped")
_LOSSES = 1e-6


def measure(quick: bool = False) -> dict[str, Any]:
    """Return median seconds per step of both variants, their ratio, and the difference of the losses.

    Both variants train from the same initial weights on the same batches. Runs alternate, and their first
    step, which tunes chunks, is discarded.
    """
    steps, rounds = (2, 1) if quick else (5, 3)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name in WAYS:
                times, losses[name] = _train(name, steps, Path(folder), _QUICK if quick else _MODEL)
                seconds[name] += times[1:]
        dist.barrier()  # the other ranks may read from this folder
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    difference = require_same_losses(losses)
    return {
        "step_time_ratio": medians["overlapped"] / medians["stock"],
        "step_seconds": medians,
        "loss_difference": difference,
        "losses": {name: [round(loss, 6) for loss in values] for name, values in losses.items()},
    }


def require_same_losses(losses: Mapping[str, Sequence[float]]) -> float:
    """Return the largest relative difference of the overlapped variant's losses from stock's.

    Raises:
        RuntimeError: the difference exceeds 1e-6, or is NaN.
    """
    pairs = zip(losses["overlapped"], losses["stock"], strict=True)
    differences = [abs(ours / theirs - 1) for ours, theirs in pairs]
    difference = max(differences)
    if not all(each <= _LOSSES for each in differences):
        raise RuntimeError(
            f"tp-overlap: losses of the main job differ by {difference:.1e}, more than {_LOSSES:.0e}; "
            "the step times cannot be compared"
        )
    return difference


def _train(name: str, steps: int, folder: Path, model: str) -> tuple[list[float], list[float]]:
    if _EXAMPLES not in sys.path:
        sys.path.insert(0, _EXAMPLES)
    from dsa_job import training
    from dsa_job.arguments import parse_args
    from dsa_job.validation import World, check

    import mindspeed_dsa

    text = folder / "text"
    text.mkdir(exist_ok=True)
    (text / "input.py").write_text(inspect.getsource(argparse))
    flags = f"{model} {_TRAINING} --train-iters {steps} --data {text} --data-cache-path {folder / 'cache'}"
    args = parse_args(flags.split())
    check(args, World.from_environment())
    mindspeed_dsa.enable(experimental_attention_variant="dsa", use_fused_dsa=True, use_ascend_coc=True)
    mindspeed_dsa.validate(args)
    times: list[float] = []
    stepper_class = training.Stepper

    def timed_stepper(*parts: Any) -> Any:
        stepper = stepper_class(*parts)
        step = stepper.train_step

        def timed_step(*arguments: Any, **keywords: Any) -> Any:
            dist.barrier()
            start = time.perf_counter()
            result = step(*arguments, **keywords)
            times.append(slowest(time.perf_counter() - start))
            return result

        stepper.train_step = timed_step
        return stepper

    torch.manual_seed(0)
    with mock.patch.object(training, "Stepper", timed_stepper), way(name):
        records = training.train(args)
    return times, [float(record["lm_loss"]) for record in records]
