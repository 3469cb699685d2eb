"""The choices of the running session, as layers of these releases read them."""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_dsa import session


class IndexerLayout(NamedTuple):
    """Where an indexer may follow DeepSeek's published code instead of Megatron 0.16's."""

    rope_first: bool
    normalised_query: bool


def indexer_layout() -> IndexerLayout:
    """From the switches of dsa-rope-first and dsa-normalised-query."""
    running = session.current()
    settings = None if running is None else running.settings
    return IndexerLayout(
        rope_first=bool(getattr(settings, "dsa_indexer_rope_first", False)),
        normalised_query=bool(getattr(settings, "dsa_indexer_normalised_query", False)),
    )
