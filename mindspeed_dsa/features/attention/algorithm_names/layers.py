"""The algorithm of each layer.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _FromOne(list[str]):
    """One entry for each layer, by its number; layers after the last one have the last one's."""

    def __getitem__(self, number: Any) -> Any:
        return super().__getitem__(min(number, len(self)) - 1)


def count_layers_from_one(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerLayer.__init__``, which takes its number for an index."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        given = config.cp_comm_type
        if not isinstance(given, list):
            original(self, config, *args, **kwargs)
            return
        config.cp_comm_type = _FromOne(given)
        try:
            original(self, config, *args, **kwargs)
        finally:
            config.cp_comm_type = given

    return __init__
