"""Contexts of implementations that tests call without a session, and states of the session that runs."""

from __future__ import annotations

from typing import Any

from mindspeed_dsa import log, session
from mindspeed_dsa.feature import Context, Megatron


def context(feature: str, options: Any = None, root: str = "megatron") -> Context[Any]:
    """A context as a session builds it."""
    return Context(feature, options, Megatron(root), log.get(feature, root))


def running(feature: str) -> Context[Any] | None:
    """Return the context of a feature in the running session; ``None`` where it is off."""
    current = session.current()
    return current.contexts.get(feature) if current is not None else None
