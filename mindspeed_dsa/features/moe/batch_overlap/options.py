"""The switches of overlapped halves, as implementations read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        switched_on: whether the switch itself is on.
        always: layers are cut without being measured.
    """

    switched_on: bool
    always: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(
            switched_on=bool(getattr(settings, "moe_batch_overlap", False)),
            always=bool(getattr(settings, "moe_batch_overlap_always", False)),
        )


def wanted(settings: Any) -> bool:
    """Activation rule: on with the switch, or with its option alone, which validation then refuses."""
    return Options.of(settings) != Options(False, False)
