"""What the local provider has to know of other features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """Facts of this session.

    Attributes:
        groups_experts: Megatron's own provider has experts for ``--moe-grouped-gemm``.
    """

    groups_experts: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(groups_experts="moe-grouped-gemm" in settings.features_on)
