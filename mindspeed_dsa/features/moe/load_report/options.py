"""Options of moe-router-load-report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        folder: where records are written.
    """

    folder: Path

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(folder=Path(settings.moe_router_load_report))
