"""Options of schedule-trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
        """From resolved settings."""
        return cls(folder=Path(settings.trace_schedule), step=settings.trace_schedule_step)
