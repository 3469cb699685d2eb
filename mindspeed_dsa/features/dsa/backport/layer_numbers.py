"""The layer's number in the whole model, by which its indexer loss is logged.

These releases give the attention its number within a pipeline stage, or an MTP module, at best.
Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def number_in_model(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerLayer.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _number(self, self.layer_number)

    return __init__


def number_after_decoder(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionLayer.__init__``: MTP layers follow the decoder's."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _number(self.transformer_layer, self.config.num_layers + self.layer_number)

    return __init__


def _number(layer: Any, number: int) -> None:
    core_attention: Any = getattr(getattr(layer, "self_attention", None), "core_attention", None)
    if hasattr(core_attention, "indexer"):
        core_attention.layer_number = number
