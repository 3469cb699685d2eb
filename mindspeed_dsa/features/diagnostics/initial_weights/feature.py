"""Proof that two jobs start from the same weights: a digest of every parameter before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        folder: gets one file of digests per rank.
    """

    folder: Path

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(folder=Path(settings.initial_weights_dir))


FEATURE = Feature(
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
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "wrap",
            "mindspeed_dsa.features.diagnostics.initial_weights.digests:write_before_first_step",
            "every training loop gets its schedule here, and passes it the model",
        ),
    ),
    options=Options.of,
    doc="initial-weights.md",
)
