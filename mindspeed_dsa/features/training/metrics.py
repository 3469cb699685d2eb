"""Per-step records of Megatron-LM's own training loop, in the format of ``examples/pretrain_dsa.py``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_dsa.declarations import Feature, Flag
from mindspeed_dsa.patches.spec import Patch

_TRAINING = "megatron.training.training"
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_IMPL = "mindspeed_dsa.features.training.metrics_impl"

NO_TRAINING_LOOP = (
    "--step-metrics-file watches Megatron-LM's own training loop (megatron.training), and this job does not "
    "use it; write the records in the job's own loop, or leave the flag away"
)


def _check(args: Any) -> Sequence[str]:
    from mindspeed_dsa import session

    running = session.current()
    # Not every job's own arguments hold what came from the environment.
    settings = running.settings if running else args
    problems = []
    if not _exists(f"{settings.megatron_root}.training"):
        problems.append(NO_TRAINING_LOOP)
    file = Path(settings.step_metrics_file)
    if file.is_dir():
        problems.append(f"--step-metrics-file {file} is a folder; name a file, e.g. {file / 'metrics.jsonl'}")
    return problems


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


FEATURE = Feature(
    name="step-metrics",
    summary="Writes loss, gradient norm, time and memory of each step of Megatron-LM's training loop.",
    flags=(
        Flag(
            "--step-metrics-file",
            "Append one JSON object per training step to FILE, from the last rank: step, lm_loss, "
            "indexer_loss, grad_norm, tokens_per_s, step_time_s, peak_memory_bytes.",
            kind="value",
            metavar="FILE",
        ),
    ),
    patches=(
        Patch(
            f"{_TRAINING}:train_step",
            "wrap",
            f"{_IMPL}:with_start_time",
            "a step's time begins here, so that evaluation and checkpoints between steps do not count",
            required=False,
        ),
        Patch(
            f"{_TRAINING}:training_log",
            "wrap",
            f"{_IMPL}:with_record",
            "all figures of a step meet here, on every rank and in every release",
            params=("loss_dict", "iteration", "grad_norm"),
            required=False,
        ),
        Patch(
            f"{_DSA}:DSAIndexerLossLoggingHelper.track_indexer_metrics",
            "wrap",
            f"{_IMPL}:with_indexer_loss",
            "Megatron keeps the indexer loss as a sum over the log interval; this takes each step's own",
            params=("total_loss_dict",),
            versions=">=0.16",
            required=False,
        ),
    ),
    validate=_check,
    on_finalize=f"{_IMPL}:require_training_loop",
    doc="step-metrics.md",
)
FEATURES = (FEATURE,)
