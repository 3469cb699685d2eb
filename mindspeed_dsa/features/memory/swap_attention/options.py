"""The switches of swapped attention, as implementations read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.megatron.layers import LayerOptions, follows_pieces

MODULES = {
    "input_norm": "input_layernorm",
    "self_attention": "self_attention",
    "post_attention_norm": "pre_mlp_layernorm",
}
"""Names for ``--swap-modules``, and what they are called in Megatron's layers."""
DEFAULT_MODULES = "self_attention"
DEFAULT_MIN_BYTES = 1 << 20


@dataclass(frozen=True)
class Options(LayerOptions):
    """What was asked for.

    Attributes:
        modules: names with commas between them; ``None`` if unset.
        min_bytes: smaller storages stay on the device; ``None`` if unset.
    """

    modules: str | None
    min_bytes: int | None

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(
            switched_on=bool(getattr(settings, "swap_attention", False)),
            num_layers=getattr(settings, "swap_attention_num_layers", None),
            follows_pieces=follows_pieces(settings),
            modules=getattr(settings, "swap_modules", None),
            min_bytes=getattr(settings, "swap_attention_min_bytes", None),
        )

    @property
    def names(self) -> list[str]:
        """Of the modules, out of :data:`MODULES` once they are validated."""
        return [name.strip() for name in (self.modules or DEFAULT_MODULES).split(",")]

    @property
    def attributes(self) -> tuple[str, ...]:
        """Attributes of a layer whose modules swap."""
        return tuple(MODULES[name] for name in self.names)

    @property
    def smallest(self) -> int:
        """Bytes of the smallest storage that swaps."""
        return DEFAULT_MIN_BYTES if self.min_bytes is None else self.min_bytes
