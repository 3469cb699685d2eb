"""Megatron's own fused rotary embedding, which is on unless somebody says no."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def take_the_place_of_megatrons(args: Any) -> Sequence[str]:
    """Switch off ``apply_rope_fusion``; ``Feature.rewrite``.

    It is true by default, so nobody has asked for it: nothing contradicts the flag that was given.
    """
    if not getattr(args, "apply_rope_fusion", False):
        return ()
    args.apply_rope_fusion = False
    return ("fused-rotary-pos-emb: apply_rope_fusion is False, ours takes the place of Megatron's",)
