"""Which parts of DSA the hooks take over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mindspeed_dsa.features.attention.dsa.options import Options


def options_of(settings: Any) -> Options:
    """Those that were chosen; all of them, if none was named."""
    chosen = Options.of(settings)
    if chosen.any:
        return chosen
    return replace(chosen, absorb=True, indexer=True, attention=True, kl_loss=True)
