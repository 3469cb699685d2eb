"""The switches of recomputed activation functions, as implementations read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.megatron.layers import LayerOptions, follows_pieces


@dataclass(frozen=True)
class Options(LayerOptions):
    """What was asked for.

    Attributes:
        verify: compare recomputed bytes with those of the forward.
    """

    verify: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(
            switched_on=bool(getattr(settings, "recompute_activation_function", False)),
            num_layers=getattr(settings, "recompute_activation_function_num_layers", None),
            follows_pieces=follows_pieces(settings),
            verify=bool(getattr(settings, "recompute_verify", False)),
        )
