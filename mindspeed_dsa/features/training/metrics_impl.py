"""One record per step of ``megatron.training.training.train``.

A step lasts from its ``train_step`` to the moment its loss is a number on the host; evaluation,
checkpoints and Megatron's own logging lie outside.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_dsa import platforms, session
from mindspeed_dsa.features.training.metrics import NO_TRAINING_LOOP
from mindspeed_dsa.patches import MindSpeedDSAError

_INDEXER_LOSS = "indexer loss"


class _Step:
    """What is known of the step that runs."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.samples_before = 0
        self.indexer_loss: float | None = None


_step = _Step()


def with_start_time(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``train_step``: note clock and consumed samples."""

    def train_step(*args: Any, **kwargs: Any) -> Any:
        _step.samples_before = _job_args().consumed_train_samples
        _step.indexer_loss = None
        platforms.current().synchronize()
        _step.begin = time.perf_counter()
        return original(*args, **kwargs)

    return train_step


def with_indexer_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DSAIndexerLossLoggingHelper.track_indexer_metrics``.

    The caller's dictionary holds a sum over the steps since the last log line. The original adds to
    an empty one here, which is then added to the caller's: the same sum, and the step's own share.
    """

    def track_indexer_metrics(*args: Any, **kwargs: Any) -> Any:
        total = kwargs.get("total_loss_dict")
        if total is None:
            return original(*args, **kwargs)
        share: dict[str, torch.Tensor] = {}
        result = original(*args, **{**kwargs, "total_loss_dict": share})
        for name, loss in share.items():
            total[name] = total[name] + loss if name in total else loss
        if _INDEXER_LOSS in share:
            _step.indexer_loss = float(share[_INDEXER_LOSS])
        return result

    return track_indexer_metrics


def with_record(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``training_log``: write the step's record once Megatron has logged it."""

    def training_log(*args: Any, **kwargs: Any) -> Any:
        # Parameters moved between releases; names did not.
        given = _signature().bind(*args, **kwargs).arguments
        lm_loss = _lm_loss(given["loss_dict"])
        platforms.current().synchronize()
        seconds = time.perf_counter() - _step.begin
        result = original(*args, **kwargs)
        peak = _largest_over_ranks(platforms.current().memory().peak)
        if _is_last_rank():
            job = _job_args()
            tokens = (job.consumed_train_samples - _step.samples_before) * job.seq_length
            grad_norm = given["grad_norm"]
            _append(
                {
                    "step": int(given["iteration"]),
                    "lm_loss": lm_loss,
                    "indexer_loss": _step.indexer_loss,
                    "grad_norm": None if grad_norm is None else float(grad_norm),
                    "tokens_per_s": tokens / seconds,
                    "step_time_s": seconds,
                    "peak_memory_bytes": peak,
                }
            )
        return result

    return training_log


def require_training_loop() -> None:
    """Refuse a job that never loaded Megatron-LM's training loop.

    Raises:
        MindSpeedDSAError: ``megatron.training.training`` is not imported when the model is built.
    """
    if f"{_root()}.training.training" not in sys.modules:
        raise MindSpeedDSAError(f"mindspeed_dsa: step-metrics: {NO_TRAINING_LOOP}")


def _lm_loss(losses: Mapping[str, Any]) -> float | None:
    """Language model loss in nats per token; known to the last pipeline stage only.

    Args:
        losses: means over the global batch by name; a loop with a single loss may name it as it likes.
    """
    if "lm loss" in losses:
        return float(losses["lm loss"])
    return float(next(iter(losses.values()))) if len(losses) == 1 else None


def _append(record: Mapping[str, Any]) -> None:
    running = session.current()
    assert running is not None  # the patches of this feature are undone with the session
    file = Path(running.settings.step_metrics_file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def _largest_over_ranks(value: int) -> int:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    # Exact: float64 holds integers up to 2**53.
    largest = torch.tensor(float(value), dtype=torch.float64, device=platforms.current().device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _is_last_rank() -> bool:
    """The last rank belongs to the last pipeline stage in every order of the parallel groups."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def _signature() -> inspect.Signature:
    # The composed function carries the original's signature, whatever else wraps it.
    return inspect.signature(sys.modules[f"{_root()}.training.training"].training_log)


def _job_args() -> Any:
    return import_module(f"{_root()}.training.global_vars").get_args()


def _root() -> str:
    running = session.current()
    return str(running.settings.megatron_root) if running else "megatron"
