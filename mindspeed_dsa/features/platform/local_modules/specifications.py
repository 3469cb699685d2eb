"""Specifications of models that are made of Transformer Engine's modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mindspeed_dsa.megatron.releases import takes
from mindspeed_dsa.patches.errors import SettingsError

_CHOICE = "use_transformer_engine"


def refuse_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that makes a specification, of Transformer Engine's modules or as it is told."""
    may_choose = takes(original, _CHOICE)

    def specify(*args: Any, **kwargs: Any) -> Any:
        if may_choose:
            given = inspect.signature(original).bind_partial(*args, **kwargs)
            given.apply_defaults()
            if not given.arguments.get(_CHOICE):
                return original(*args, **kwargs)
        raise SettingsError(
            "local-modules: --transformer-impl transformer_engine (Megatron's default) needs Transformer "
            "Engine, which is not installed; add --transformer-impl local"
        )

    return specify
