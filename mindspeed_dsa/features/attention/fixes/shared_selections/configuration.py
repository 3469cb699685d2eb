"""The same refusal for models whose configuration comes from no parser of Megatron's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_dsa.context import Context
from mindspeed_dsa.features.attention.fixes.shared_selections.validation import check_recompute, uses_dsa
from mindspeed_dsa.integration.configuration import require


def refuse_recompute(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if uses_dsa(self):
            require(context, check_recompute, self)
        original(self, *args, **kwargs)

    return __post_init__
