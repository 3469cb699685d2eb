"""Checks of the requirements of step-metrics."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.diagnostics.step_metrics.options import Options
from mindspeed_dsa.patches.errors import MindSpeedDSAError

_NO_TRAINING_LOOP = (
    "--step-metrics-file records Megatron-LM's own training loop (megatron.training), and this job does not "
    "use it; write the records in the job's own loop, or omit the flag"
)


def check_step_metrics(args: Any) -> Sequence[str]:
    """Report a missing training loop or an unusable file."""
    problems = []
    if not _exists(f"{args.megatron_root}.training"):
        problems.append(_NO_TRAINING_LOOP)
    file = Path(args.step_metrics_file)
    if file.is_dir():
        problems.append(f"--step-metrics-file {file} is a folder; name a file, e.g. {file / 'metrics.jsonl'}")
    return problems


def require_training_loop(context: Context[Options]) -> None:
    """Refuse a job that never loaded Megatron-LM's training loop.

    Raises:
        MindSpeedDSAError: ``megatron.training.training`` is not imported when the model is built.
    """
    if f"{context.megatron.root}.training.training" not in sys.modules:
        raise MindSpeedDSAError(f"mindspeed_dsa: {context.feature}: {_NO_TRAINING_LOOP}")


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
