"""Options of fused DSA, for checks and implementations."""

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
"""The parts that ``--use-fused-dsa`` enables; each can also be enabled or disabled individually.

The first one can also be :data:`~mindspeed_dsa.declarations.AUTO`, and is where ``--use-fused-dsa`` alone
enables it.
"""


@dataclass(frozen=True)
class Options:
    """The parts of DSA's attention path that run on our operators.

    Attributes:
        absorb: the absorbed form may be taken.
        absorb_always: it is, whatever the length.
        cpu_bf16: how CPUs multiply bf16, see :data:`mindspeed_dsa.ops.cpu_bf16.Way`.
    """

    absorb: bool
    absorb_always: bool
    indexer: bool
    attention: bool
    kl_loss: bool
    backend: str
    warmup: bool
    fuse_kl_in_backward: bool
    cp_block_rows: int
    keep_gathered: bool
    cpu_bf16: str

    @property
    def any(self) -> bool:
        """Whether any part of Megatron's attention path is replaced."""
        return self.absorb or self.indexer or self.attention or self.kl_loss or self.warmup

    @property
    def all_ours(self) -> bool:
        """Whether no part of the core attention runs Megatron's own code."""
        return self.indexer and self.attention and self.kl_loss

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Build from resolved settings or a job's argument namespace; absent switches are off."""
        everything = bool(getattr(settings, "use_fused_dsa", False))
        chosen = [getattr(settings, part, None) for part in PARTS]
        absorb, indexer, attention, kl_loss = (everything if one is None else bool(one) for one in chosen)
        return cls(
            absorb=absorb,
            absorb_always=chosen[0] is True,
            indexer=indexer,
            attention=attention,
            kl_loss=kl_loss,
            backend=getattr(settings, "dsa_backend", None) or "auto",
            warmup=getattr(settings, "dsa_stage", None) == "warmup",
            fuse_kl_in_backward=bool(getattr(settings, "dsa_fuse_kl_in_backward", False)),
            cp_block_rows=getattr(settings, "cp_block_rows", None) or 0,
            keep_gathered=bool(getattr(settings, "cp_keep_gathered", False)),
            cpu_bf16=getattr(settings, "dsa_cpu_bf16", None) or "auto",
        )


def fused_wanted(settings: Any) -> bool:
    """Whether any option is set, even one that has no effect by itself: a check reports that mistake."""
    chosen = Options.of(settings)
    return chosen.any or chosen.fuse_kl_in_backward


def absorb_wanted(settings: Any) -> bool:
    """Whether the absorbed form is on, alone or with the other parts."""
    return Options.of(settings).absorb


def warmup_wanted(settings: Any) -> bool:
    """``--dsa-stage warmup``."""
    return Options.of(settings).warmup
