"""The parts of DSA that the hooks run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.features.attention.dsa import options as dsa

if TYPE_CHECKING:
    from typing_extensions import Self

SHARED_KEYS = ">=0.19,<0.20"
"""Releases whose context parallel ranks share keys by our gathers."""


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


def shares_keys(config: Any, chosen: dsa.Options) -> bool:
    """Whether a model's context parallel ranks share keys by our gathers instead of Megatron's.

    Args:
        config: Megatron's, of a model.
        chosen: the parts that run on our operators.
    """
    # Layers that share a selection of keys are served by Megatron's code, hook by hook.
    every_layer_selects = (getattr(config, "dsa_indexer_topk_freq", None) or 1) == 1
    is_dsa = getattr(config, "experimental_attention_variant", None) == "dsa"
    return chosen.all_ours and is_dsa and every_layer_selects


def kernel_hooks_wanted(settings: Any) -> bool:
    """Whether any switch of fused DSA is on, or Megatron's flag names our backend."""
    named = getattr(settings, "dsa_backend", "auto") != "auto"
    return dsa.Options.of(settings).any or named or settings.dsa_kernel_backend == "mindspeed"
