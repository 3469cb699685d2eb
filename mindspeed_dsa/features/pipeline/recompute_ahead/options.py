"""Options of recompute-ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        everywhere: ahead of every gradient; else only of those that a rank waits for.
    """

    everywhere: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(everywhere=bool(settings.recompute_in_advance))
