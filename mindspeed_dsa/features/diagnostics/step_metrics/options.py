"""The switches of step-metrics, as its implementation reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        file: where records are appended.
    """

    file: Path

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(file=Path(settings.step_metrics_file))
