"""Per-step records of Megatron-LM's own training loop, in the format of ``examples/pretrain_dsa.py``."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.diagnostics.step_metrics.options import Options
from mindspeed_dsa.features.diagnostics.step_metrics.validation import check_step_metrics
from mindspeed_dsa.patches.spec import Patch

_TRAINING = "megatron.training.training"
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_HERE = "mindspeed_dsa.features.diagnostics.step_metrics"

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
            f"{_HERE}.records:time_step",
            "a step's time begins here, so that evaluation and checkpoints between steps are excluded",
            required=False,
        ),
        Patch(
            f"{_TRAINING}:training_log",
            "wrap",
            f"{_HERE}.records:record_step",
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
    options=Options.of,
    validate=check_step_metrics,
    on_finalize=f"{_HERE}.validation:require_training_loop",
    doc="step-metrics.md",
)
