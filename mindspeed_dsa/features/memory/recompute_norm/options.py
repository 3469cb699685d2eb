"""The switches of recomputed norms, as implementations read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.megatron.layers import LayerOptions, follows_pieces


@dataclass(frozen=True)
class Options(LayerOptions):
    """What was asked for."""

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(
            switched_on=bool(getattr(settings, "recompute_norm", False)),
            num_layers=getattr(settings, "recompute_norm_num_layers", None),
            follows_pieces=follows_pieces(settings),
        )
