"""What implementations are composed with, for tests that call them without a session."""

from __future__ import annotations

from typing import Any

from mindspeed_dsa import log
from mindspeed_dsa.feature import Context, Megatron


def context(feature: str, options: Any = None, root: str = "megatron") -> Context[Any]:
    """A context as a session builds it."""
    return Context(feature, options, Megatron(root), log.get(feature, root))
