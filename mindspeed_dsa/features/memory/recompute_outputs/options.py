"""The switch of recomputed outputs, as implementations read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        verify: compare recomputed bytes with those of the forward.
    """

    verify: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(verify=bool(getattr(settings, "recompute_verify", False)))
