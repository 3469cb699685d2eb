"""Options of schedule-trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError

STEP = 3
"""Recorded by default: the first ones allocate memory, and measure what features measure once."""


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        folder: where the files go.
        step: which training step of the run is recorded, from 1.
    """

    folder: Path
    step: int

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings.

        Raises:
            SettingsError: a step without a folder.
        """
        folder, step = settings.trace_schedule, settings.trace_schedule_step
        if folder is None:
            raise SettingsError(
                f"--trace-schedule-step {step} records nothing without --trace-schedule; name a folder with "
                "that, or omit it"
            )
        return cls(folder=Path(folder), step=STEP if step is None else step)
