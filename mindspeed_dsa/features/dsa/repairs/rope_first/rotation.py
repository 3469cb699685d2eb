"""The indexer's rotary embedding in DeepSeek's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.deepseek_layout import rotate_first_dimensions


def rotate_first(context: Context[None]) -> Callable[..., Tensor]:
    """Replaces ``DSAIndexer._apply_rope``; see :func:`rotate_first_dimensions`."""

    def _apply_rope(self: Any, x: Tensor, rotary_pos_emb: Tensor, mscale: float) -> Tensor:
        return rotate_first_dimensions(
            context.megatron, self, x, rotary_pos_emb, mscale, cp_group=self.pg_collection.cp
        )

    return _apply_rope
