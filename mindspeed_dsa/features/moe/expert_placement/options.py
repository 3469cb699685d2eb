"""Options of moe-expert-placement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

AUTO = "auto"


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        file: the placement; ``None`` where it is made from a report.
        reports: folders in which that report may be, the first that has one counts.
    """

    file: Path | None
    reports: tuple[Path, ...] = ()

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        wanted = settings.moe_expert_placement
        if wanted != AUTO:
            return cls(Path(wanted))
        folders = [getattr(settings, "moe_router_load_report", None)]
        for checkpoints in (settings.load, settings.save):
            folders += [checkpoints, checkpoints and Path(checkpoints).parent]
        return cls(None, tuple(Path(folder) for folder in folders if folder))
