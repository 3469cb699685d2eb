"""A few steps of the example's model on one rank, on random tokens, with their measurements.

Any number of jobs runs in one process, one after the other. Text would require Megatron's indexed data sets,
which need a compiler.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_EXAMPLES = str(Path(__file__).parents[2] / "examples")
VOCABULARY = 1024
# Write no files, and keep all steps alike.
_TRAINING = "--lr-warmup-iters 0 --lr-decay-style constant --no-tensorboard --no-plot"
WARM_UP = 2
"""Steps that compile kernels and allocate memory."""
_SHOWN = 25


def train(
    flags: Sequence[str],
    steps: int,
    trace: Path | None = None,
    deterministic: bool = False,
    prepare: Callable[[Any], None] = lambda model: None,
) -> dict[str, Any]:
    """Train; return each step's losses, the median milliseconds of a step, device memory and operator calls.

    Args:
        flags: flags of ``pretrain_dsa.py`` and of features.
        steps: number of steps; times are of the steps after :data:`WARM_UP`, if there are any.
        trace: file for a trace of one more step; its kernels are added to the result.
        deterministic: whether to add in a fixed order and return a digest of the weights.
        prepare: function called with the model's chunks before the optimizer is built.
    """
    if _EXAMPLES not in sys.path:
        sys.path.insert(0, _EXAMPLES)
    import mindspeed_dsa
    from mindspeed_dsa import session

    argv = [*_TRAINING.split(), *flags]
    session.enable_from_argv(argv)
    try:
        return _train(argv, steps, trace, deterministic, prepare)
    finally:
        mindspeed_dsa.disable()
        # Megatron sizes the tracker for the process's first model.
        from megatron.core.transformer.moe import moe_utils

        moe_utils.get_moe_layer_wise_logging_tracker().clear()
        gc.collect()
        if torch.cuda.is_available():  # true on NPUs, too, once that platform is prepared
            torch.cuda.empty_cache()


def _train(
    argv: list[str],
    steps: int,
    trace: Path | None,
    deterministic: bool,
    prepare: Callable[[Any], None],
) -> dict[str, Any]:
    from dsa_job import app, distributed
    from dsa_job.arguments import parse_args
    from dsa_job.model import build_model, build_optimizer, build_scheduler, model_config
    from dsa_job.step import Stepper
    from dsa_job.validation import World, check

    from mindspeed_dsa import platforms
    from mindspeed_dsa.ops.backend import calls

    world = World.from_environment()
    args = parse_args(argv)
    length = args.seq_length  # padding makes it longer
    check(args, world)
    app.enable_features(args)
    args.padded_vocab_size = VOCABULARY
    distributed.initialize(args, world)
    before = calls()
    platform = platforms.current()
    has_memory = platform.name != "cpu"
    level = 0
    if has_memory:
        # Memory that earlier jobs have left does not count.
        level = platform.memory().current
        platform.reset_peak_memory()
    with _order_of_sums(deterministic), distributed.model_parallel(args), _counted_starts() as starts:
        torch.manual_seed(args.seed)
        config = model_config(args)
        model = build_model(args, config)
        prepare(model)
        optimizer = build_optimizer(args, model)
        stepper = Stepper(args, config, model, optimizer, build_scheduler(args, optimizer))
        stream = [_batches(args, length) for _ in model]
        records = [_step(stepper, number, stream) for number in range(steps)]
        figures: dict[str, Any] = {
            name: [record[name] for record in records] for name in ("lm_loss", "indexer_loss", "grad_norm")
        }
        timed = records[WARM_UP:] or records
        figures["step_ms"] = statistics.median(record["seconds"] for record in timed) * 1e3
        figures["tokens_per_s"] = args.global_batch_size * length / figures["step_ms"] * 1e3
        figures["parameters"] = sum(p.numel() for chunk in model for p in chunk.parameters())
        figures["calls"] = {" ".join(names): count for names, count in (calls() - before).items()}
        figures["started"] = len(starts)
        if has_memory:
            memory = platform.memory()
            figures["peak_mib"] = (memory.peak - level) / 2**20
            figures["rest_mib"] = (memory.current - level) / 2**20
        if deterministic:
            figures["weights"] = _digest(model)
        if trace is not None:
            figures["kernels"] = _traced(lambda: _step(stepper, steps, stream), trace)
        stepper.release()
    return figures


@contextlib.contextmanager
def _counted_starts() -> Iterator[list[None]]:
    """Yield a list that grows by one entry for each start of work on the second stream."""
    from mindspeed_dsa.megatron import second_stream

    start, starts = second_stream.start, []  # type: Any, list[None]

    def counted(*args: Any) -> Any:
        starts.append(None)
        return start(*args)

    with mock.patch.object(second_stream, "start", counted):
        yield starts


@contextlib.contextmanager
def _order_of_sums(fixed: bool) -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    if fixed:
        torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def _batches(args: Any, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield one batch over and over, so that the loss falls if the gradients are right."""
    shape = (args.micro_batch_size, length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (shape[0], shape[1] + 1), generator=generator)
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(shape),
        "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
    }
    if args.pack_documents:
        from dsa_job.data import with_lengths

        batch = dict(with_lengths(batch, end=0))
    while True:
        yield batch


def _step(stepper: Any, number: int, stream: list[Iterator[Any]]) -> dict[str, Any]:
    from mindspeed_dsa import platforms

    synchronize = platforms.current().synchronize
    synchronize()
    started = time.perf_counter()
    lm_loss, indexer_loss, grad_norm = stepper.train_step(number + 1, stream)
    synchronize()
    seconds = time.perf_counter() - started
    return {"lm_loss": lm_loss, "indexer_loss": indexer_loss, "grad_norm": grad_norm, "seconds": seconds}


def _digest(model: Sequence[Any]) -> str:
    """Return the SHA-256 digest of all weights."""
    digest = hashlib.sha256()
    for chunk in model:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _traced(step: Any, file: Path) -> dict[str, Any]:
    """Trace a step for Perfetto; return milliseconds and launches of its kernels, longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    profile.export_chrome_trace(str(file))
    on_device = torch.autograd.DeviceType.CUDA
    rows = [row for row in profile.key_averages() if row.device_type == on_device]
    rows.sort(key=lambda row: -row.self_device_time_total)
    return {
        row.key[:120]: {"ms": row.self_device_time_total / 1e3, "launches": row.count}
        for row in rows[:_SHOWN]
    }
