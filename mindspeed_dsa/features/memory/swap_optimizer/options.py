"""The switches of optimizer state on the host, as implementations read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEFAULT_TIMES = 16


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        switched_on: the feature's own switch is on.
        times: number of parts of a step; ``None`` if unset.
    """

    switched_on: bool
    times: int | None

    @property
    def parts(self) -> int:
        """Number of parts of a step."""
        return DEFAULT_TIMES if self.times is None else self.times

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(
            switched_on=bool(getattr(settings, "swap_optimizer", False)),
            times=getattr(settings, "swap_optimizer_times", None),
        )
