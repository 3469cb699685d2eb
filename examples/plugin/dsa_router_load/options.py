"""The switches of router-load, as its patch reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        interval: forward passes of a layer from one line to the next.
    """

    interval: int

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(interval=settings.router_load_interval)
