"""The parts of DSA that the hooks run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.megatron import dsa as dsa

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Options(dsa.Options):
    """The selected parts; all of them, if none was named."""

    @classmethod
    def of(cls, settings: Any) -> Self:
        """From resolved settings."""
        chosen = super().of(settings)
        if chosen.any:
            return chosen
        return replace(chosen, absorb=True, indexer=True, attention=True, kl_loss=True)


def kernel_hooks_wanted(settings: Any) -> bool:
    """Whether any switch of fused DSA is on, or Megatron's flag names our backend."""
    named = getattr(settings, "dsa_backend", "auto") != "auto"
    return dsa.Options.of(settings).any or named or settings.dsa_kernel_backend == "mindspeed"
