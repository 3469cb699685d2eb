"""Contexts of implementations that tests call without a session, and states of the running session."""

from __future__ import annotations

from typing import Any

from mindspeed_dsa import log, session
from mindspeed_dsa.feature import Context, Megatron


def context(feature: str, options: Any = None, root: str = "megatron") -> Context[Any]:
    """Build a context like a session's."""
    return Context(feature, options, Megatron(root), log.get(feature, root))


def running(feature: str) -> Context[Any] | None:
    """Return the context of a feature in the running session; ``None`` if it is off."""
    current = session.current()
    return current.contexts.get(feature) if current is not None else None
