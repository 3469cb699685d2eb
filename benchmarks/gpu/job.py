"""A few steps of the example's model on one rank, on tokens drawn at random, for what they tell.

``python -m benchmarks.gpu.job STEPS TRACE FLAGS...``; the last line of output is one JSON object. Text would
need Megatron's indexed data sets, and a compiler for them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_EXAMPLES = str(Path(__file__).parents[2] / "examples")
VOCABULARY = 1024
# Nothing is written, and steps are alike.
_TRAINING = "--lr 1e-4 --min-lr 1e-4 --lr-warmup-iters 0 --lr-decay-style constant --no-tensorboard --no-plot"
WARM_UP = 2
"""Steps in which kernels are compiled and memory is asked for."""


def train(flags: Sequence[str], steps: int, trace: str | None = None) -> dict[str, Any]:
    """Losses of each step, tokens per second of the steps behind the warm-up, and the most memory held.

    Args:
        flags: of ``pretrain_dsa.py``.
        steps: more than :data:`WARM_UP`.
        trace: file for a trace of one more step, whose kernels are in the result, too.
    """
    if _EXAMPLES not in sys.path:
        sys.path.insert(0, _EXAMPLES)
    from dsa_job import app, distributed
    from dsa_job.arguments import parse_args
    from dsa_job.model import build_model, build_optimizer, build_scheduler, model_config
    from dsa_job.step import Stepper
    from dsa_job.validation import World, check

    world = World.from_environment()
    args = parse_args([*_TRAINING.split(), *flags])
    check(args, world)
    app.enable_features(args)
    args.padded_vocab_size = VOCABULARY
    distributed.initialize(args, world)
    with distributed.model_parallel(args):
        torch.manual_seed(args.seed)
        config = model_config(args)
        model = build_model(args, config)
        optimizer = build_optimizer(args, model)
        stepper = Stepper(args, config, model, optimizer, build_scheduler(args, optimizer))
        stream = [_batches(args)]
        records = [_step(stepper, number, stream) for number in range(steps)]
        found = {
            "lm_loss": [record["lm_loss"] for record in records],
            "indexer_loss": [record["indexer_loss"] for record in records],
            "grad_norm": [record["grad_norm"] for record in records],
            "step_ms": statistics.median(record["seconds"] for record in records[WARM_UP:]) * 1e3,
            "parameters": sum(p.numel() for chunk in model for p in chunk.parameters()),
        }
        found["tokens_per_s"] = args.global_batch_size * args.seq_length / found["step_ms"] * 1e3
        if torch.cuda.is_available():
            found["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        if trace:
            found["kernels"] = _traced(lambda: _step(stepper, steps, stream), trace)
        stepper.release()
    return found


def _batches(args: Any) -> Iterator[dict[str, torch.Tensor]]:
    """One batch over and over, so that the loss falls if the gradients are right."""
    shape = (args.micro_batch_size, args.seq_length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (shape[0], shape[1] + 1), generator=generator)
    while True:
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
        }


def _step(stepper: Any, number: int, stream: list[Iterator[Any]]) -> dict[str, Any]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    lm_loss, indexer_loss, grad_norm = stepper.train_step(number + 1, stream)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return {"lm_loss": lm_loss, "indexer_loss": indexer_loss, "grad_norm": grad_norm, "seconds": seconds}


def _traced(step: Any, file: str) -> dict[str, Any]:
    """The step's kernels by name, longest first: milliseconds and launches; the trace is for Perfetto."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    profile.export_chrome_trace(file)
    rows = [row for row in profile.key_averages() if row.device_type == torch.autograd.DeviceType.CUDA]
    rows.sort(key=lambda row: -row.self_device_time_total)
    return {
        row.key[:120]: {"ms": row.self_device_time_total / 1e3, "launches": row.count} for row in rows[:25]
    }


if __name__ == "__main__":
    steps, trace, *flags = sys.argv[1:]
    print(json.dumps(train(flags, int(steps), trace or None)))
