"""Which algorithm the layers run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.context_parallel.algorithms import Algorithms

DEFAULT = "p2p"
"""Megatron's own."""
NO_DEAL = (
    "under context parallelism Megatron rotates the rows of grouped heads where Transformer Engine cuts "
    "documents, and --pack-documents deals them out by work; omit --pack-documents, or use latent attention"
)
"""Why dense attention without latents has no rows that were dealt out."""


@dataclass(frozen=True)
class Options(Algorithms):
    """The algorithms of a job's layers."""


def wanted(settings: Any) -> bool:
    """Whether a dense model has context parallel ranks, or latent attention on Megatron's own modules."""
    if getattr(settings, "experimental_attention_variant", None) == "dsa":
        return False
    latent = getattr(settings, "multi_latent_attention", False)
    local = getattr(settings, "transformer_impl", None) == "local"
    return Options.of(settings).ranks > 1 or bool(latent and local)
