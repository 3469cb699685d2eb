"""Where Megatron's own modules need repairs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def is_needed(settings: Any) -> bool:
    """Without Transformer Engine: away from GPUs, and wherever the implementation was named."""
    if find_spec("transformer_engine") is not None:
        return False
    return bool(settings.platform != "cuda" or settings.transformer_impl)
