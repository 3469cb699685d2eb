"""The switches of fused DSA, as checks and implementations read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

PARTS = (
    "use_dsa_absorb",
    "use_fused_lightning_indexer",
    "use_fused_sparse_flash_attention",
    "use_fused_lightning_indexer_kl_loss",
)
"""What ``--use-fused-dsa`` switches on, each of which can also be chosen, or refused, alone."""


@dataclass(frozen=True)
class Options:
    """What of DSA's attention path runs on our operators."""

    absorb: bool
    indexer: bool
    attention: bool
    kl_loss: bool
    backend: str
    warmup: bool
    fuse_kl_in_backward: bool

    @property
    def any(self) -> bool:
        """Whether Megatron's own attention path is left at all."""
        return self.absorb or self.indexer or self.attention or self.kl_loss or self.warmup

    @property
    def all_ours(self) -> bool:
        """Whether Megatron's own code computes nothing of the core attention."""
        return self.indexer and self.attention and self.kl_loss

    @classmethod
    def of(cls, settings: Any) -> Self:
        """From resolved settings or a job's argument namespace; absent switches are off."""
        everything = bool(getattr(settings, "use_fused_dsa", False))
        chosen = [getattr(settings, part, None) for part in PARTS]
        absorb, indexer, attention, kl_loss = (everything if one is None else bool(one) for one in chosen)
        return cls(
            absorb=absorb,
            indexer=indexer,
            attention=attention,
            kl_loss=kl_loss,
            backend=getattr(settings, "dsa_backend", None) or "auto",
            warmup=getattr(settings, "dsa_stage", None) == "warmup",
            fuse_kl_in_backward=bool(getattr(settings, "dsa_fuse_kl_in_backward", False)),
        )


def fused_wanted(settings: Any) -> bool:
    """Also where only an option is set that has no effect by itself: a mistake that a check reports."""
    chosen = Options.of(settings)
    return chosen.any or chosen.fuse_kl_in_backward


def absorb_wanted(settings: Any) -> bool:
    """The absorbed form, alone or with all the rest."""
    return Options.of(settings).absorb


def warmup_wanted(settings: Any) -> bool:
    """``--dsa-stage warmup``."""
    return Options.of(settings).warmup
