"""Options of initial-weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
