"""The switches that DSA reads on these releases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mindspeed_dsa.megatron import dsa as dsa


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        dsa: every part runs on our operators: Megatron has no implementation to fall back to.
        rope_first: DeepSeek's order of the indexer's dimensions (dsa-rope-first).
        normalised_query: the indexer reads the latent query after its norm (dsa-normalised-query).
    """

    dsa: dsa.Options
    rope_first: bool
    normalised_query: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(
            dsa=replace(dsa.Options.of(settings), indexer=True, attention=True, kl_loss=True),
            rope_first=bool(settings.dsa_indexer_rope_first),
            normalised_query=bool(settings.dsa_indexer_normalised_query),
        )
