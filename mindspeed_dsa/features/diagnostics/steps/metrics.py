"""Recorder of metrics for each step of ``megatron.training.training.train``.

The time of a step is measured from the call of ``train_step`` until its loss has arrived on the host. It
excludes evaluation, checkpoints and Megatron's logging.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.diagnostics.steps.feature import MetricsOptions
from mindspeed_dsa.megatron import indexer_loss
from mindspeed_dsa.runs import metrics


class _Step:
    """State of the current step."""

    def __init__(self, context: Context[MetricsOptions]) -> None:
        self.begin = 0.0
        self.samples_before = 0


def time_step(original: Callable[..., Any], context: Context[MetricsOptions]) -> Callable[..., Any]:
    """Decorate ``train_step``: record the start time and the consumed samples."""
    step = context.state(_Step)

    def train_step(*args: Any, **kwargs: Any) -> Any:
        step.samples_before = _job_args(context).consumed_train_samples
        indexer_loss.take_step_loss(context.megatron)  # drop the loss of a failed step
        # Wait for kernels that were queued before the step.
        platforms.current().synchronize()
        step.begin = time.perf_counter()
        return original(*args, **kwargs)

    return train_step


def record_step(original: Callable[..., Any], context: Context[MetricsOptions]) -> Callable[..., Any]:
    """Decorate ``training_log``: write the step's record after Megatron has logged it."""
    step = context.state(_Step)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        # Positions of parameters differ between releases, names do not.
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        lm_loss = _lm_loss(arguments["loss_dict"])
        platforms.current().synchronize()
        seconds = time.perf_counter() - step.begin
        result = original(*args, **kwargs)
        peak = _largest_over_ranks(platforms.current().memory().peak)
        of_indexer = indexer_loss.take_step_loss(context.megatron)
        if _is_last_rank():
            job = _job_args(context)
            tokens = (job.consumed_train_samples - step.samples_before) * job.seq_length
            grad_norm = arguments["grad_norm"]
            metrics.append_or_warn(
                context.options.file,
                {
                    "step": int(arguments["iteration"]),
                    "lm_loss": lm_loss,
                    "indexer_loss": None if of_indexer is None else float(of_indexer),
                    "grad_norm": None if grad_norm is None else float(grad_norm),
                    "tokens_per_s": tokens / seconds,
                    "step_time_s": seconds,
                    "peak_memory_bytes": peak,
                },
                context.log,
            )
        return result

    return training_log


def _lm_loss(losses: Mapping[str, Any]) -> float | None:
    """Return the language model loss in nats per token; None on all pipeline stages but the last.

    Args:
        losses: dict from name to mean over the global batch. A single loss can have any name.
    """
    if "lm loss" in losses:
        return float(losses["lm loss"])
    return float(next(iter(losses.values()))) if len(losses) == 1 else None


def _largest_over_ranks(value: int) -> int:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    # int64, because HCCL does not reduce float64 on most devices.
    largest = torch.tensor(value, dtype=torch.int64, device=platforms.current().device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _is_last_rank() -> bool:
    """Return whether this is the last rank, which is in the last pipeline stage for every group order."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def _job_args(context: Context[MetricsOptions]) -> Any:
    return context.megatron("training.global_vars").get_args()
