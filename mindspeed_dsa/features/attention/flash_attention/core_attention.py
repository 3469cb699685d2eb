"""Which of Megatron's attention layers the operator takes.

Imports nothing of Megatron: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_dsa.context import Context
from mindspeed_dsa.context_parallel.dense import DenseAttention
from mindspeed_dsa.features.attention.dense_context_parallel.core_attention import (
    Plan,
    scale_of,
    unsupported_attention,
)


def build_for_the_operator(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``DotProductAttention.__init__``.

    A layer of another kind, such as cross attention, keeps Megatron's, which is said once.
    """

    def __init__(
        self: Any,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(self, config, layer_number, attn_mask_type, attention_type, *args, **kwargs)
        problem = unsupported_attention(self, attention_type)
        if problem is not None:
            context.log.warning("a layer keeps Megatron's attention, with all scores: %s", problem, once=True)
            return
        self.dense_context_parallel_plan = Plan(DenseAttention(scale_of(self)), None)

    return __init__
