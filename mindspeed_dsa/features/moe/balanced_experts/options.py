"""The switches of balanced experts, as implementations read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HOT_EXPERTS = 3


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        switched_on: whether the switch itself is on.
        hot_experts: most experts of a layer to move, ``None`` if not given.
        matmul_rate: TFLOP/s of a rank, ``None``: measured.
        link_rate: GB/s of a rank's link in one direction, ``None``: measured.
    """

    switched_on: bool
    hot_experts: int | None
    matmul_rate: float | None
    link_rate: float | None

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(
            switched_on=bool(getattr(settings, "balanced_moe_experts", False)),
            hot_experts=getattr(settings, "balanced_moe_hot_expert_num", None),
            matmul_rate=getattr(settings, "balanced_moe_matmul_rate", None),
            link_rate=getattr(settings, "balanced_moe_link_rate", None),
        )

    @property
    def limit(self) -> int:
        """Most experts of a layer to move."""
        return HOT_EXPERTS if self.hot_experts is None else self.hot_experts


def wanted(settings: Any) -> bool:
    """Activation rule: on with the switch, or with an option alone, which validation then refuses."""
    options = Options.of(settings)
    return options.switched_on or options != Options(False, None, None, None)
