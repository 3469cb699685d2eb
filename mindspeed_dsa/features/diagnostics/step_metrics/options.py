"""Options of step-metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        file: where records are appended.
    """

    file: Path

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(file=Path(settings.step_metrics_file))
