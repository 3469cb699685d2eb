"""The distributed optimizer's fp8 weights without Transformer Engine: there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def unless_there_are_none(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``quantize_param_shard``, which fails without Transformer Engine even on an empty list."""

    def quantize_param_shard(model_params: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        if model_params:
            original(model_params, *args, **kwargs)

    return quantize_param_shard
