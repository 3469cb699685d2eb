"""Options of the fused SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """What else is asked for.

    Attributes:
        apart: each expert's activation is recomputed by itself.
    """

    apart: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(apart=bool(getattr(settings, "recompute_activation_function", False)))
