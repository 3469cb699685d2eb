"""Models without rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.operators.selection import check_selection, is_named
from mindspeed_dsa.megatron.configuration import argument

_SWITCH = "use_fused_rotary_pos_emb"
_ROTARY = ("rope", "yarn", "mrope")


def check_rotary(args: Any, _: Any) -> Iterator[str]:
    """What in a job's arguments does not go with a fused rotary embedding."""
    yield from check_selection(args, "rotary-pos-emb", _SWITCH)
    if not is_named(args, "rotary-pos-emb", _SWITCH) or argument(args, "multi_latent_attention"):
        return
    embedding = argument(args, "position_embedding_type") or "rope"
    if embedding not in _ROTARY:
        yield (
            f"a fused rotary embedding needs --position-embedding-type rope, and the model has {embedding}; "
            "set it, or drop rotary-pos-emb from the fused operators"
        )
