"""Features that record training: digests of the initial weights, and metrics of every step.

tests: tests/features/diagnostics
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Context, Feature, Flag
from mindspeed_dsa.megatron.configuration import check_trains
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.diagnostics.steps"
_SCHEDULE = "megatron.core.pipeline_parallel.schedules:get_forward_backward_func"

# -- initial weights -----------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightsOptions:
    """Options of ``--initial-weights-dir``.

    Attributes:
        folder: folder for one file of digests per rank.
    """

    folder: Path

    @classmethod
    def of(cls, settings: Any) -> WeightsOptions:
        """Build from resolved settings."""
        return cls(folder=Path(getattr(settings, "initial_weights_dir", None) or ""))


INITIAL_WEIGHTS = Feature(
    name="initial-weights",
    summary="Writes a digest of every parameter, taken before the first step, to one JSON file per rank.",
    flags=(
        Flag(
            "--initial-weights-dir",
            "Write SHA-256 digests of all parameters, taken right before the first forward pass, to "
            "DIR/weights-rank00000.json and so on.",
            kind="value",
            metavar="DIR",
        ),
    ),
    patches=(
        Patch(
            _SCHEDULE,
            "wrap",
            f"{_HERE}.weights:write_before_first_step",
            "every training loop gets its schedule here, and passes the model to it",
        ),
    ),
    options=WeightsOptions.of,
    doc="initial-weights.md",
)


# -- metrics of each step ------------------------------------------------------------------------


@dataclass(frozen=True)
class MetricsOptions:
    """Options of ``--step-metrics-file``.

    Attributes:
        file: file to which records are appended.
    """

    file: Path

    @classmethod
    def of(cls, settings: Any) -> MetricsOptions:
        """Build from resolved settings."""
        return cls(file=Path(settings.step_metrics_file))


_NO_TRAINING_LOOP = (
    "--step-metrics-file records Megatron-LM's own training loop (megatron.training), and this job does not "
    "use it; write the records in the job's own loop, or omit the flag"
)


def check_step_metrics(args: Any, options: Any) -> Sequence[str]:
    """Report a missing training loop or an unusable file."""
    problems = [*check_trains(args, "--step-metrics-file")]
    if not versions.is_importable(f"{args.megatron_root}.training"):
        problems.append(_NO_TRAINING_LOOP)
    file = Path(args.step_metrics_file)
    if file.is_dir():
        problems.append(f"--step-metrics-file {file} is a folder; name a file, e.g. {file / 'metrics.jsonl'}")
    return problems


def require_training_loop(context: Context[MetricsOptions]) -> None:
    """Check that the job has loaded Megatron-LM's training loop.

    Raises:
        MindSpeedDSAError: ``megatron.training.training`` is not imported when the model is built.
    """
    if f"{context.megatron.root}.training.training" not in sys.modules:
        raise MindSpeedDSAError(f"mindspeed_dsa: {context.feature}: {_NO_TRAINING_LOOP}")


_TRAINING = "megatron.training.training"
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"

STEP_METRICS = Feature(
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
            f"{_HERE}.metrics:time_step",
            "a step's time begins here, so that evaluation and checkpoints between steps are excluded",
            required=False,
        ),
        Patch(
            f"{_TRAINING}:training_log",
            "wrap",
            f"{_HERE}.metrics:record_step",
            "all metrics of a step are available here, on every rank and in every release",
            params=("loss_dict", "iteration", "grad_norm"),
            required=False,
        ),
        Patch(
            f"{_DSA}:DSAIndexerLossLoggingHelper.track_indexer_metrics",
            "wrap",
            "mindspeed_dsa.megatron.indexer_loss:keep_step_loss",
            "Megatron keeps the indexer loss as a sum over the log interval; this records each step's own",
            params=("total_loss_dict",),
            versions=">=0.16",
            required=False,
        ),
    ),
    options=MetricsOptions.of,
    check=check_step_metrics,
    on_finalize=f"{_HERE}.feature:require_training_loop",
    doc="step-metrics.md",
)
