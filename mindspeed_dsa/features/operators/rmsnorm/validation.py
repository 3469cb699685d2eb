"""Models whose norms are others, and what is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.operators.selection import check_library, check_selection, is_named
from mindspeed_dsa.megatron.configuration import argument

_SWITCH = "use_fused_rmsnorm"


def check_rmsnorm(args: Any, _: Any) -> Iterator[str]:
    """What in a job's arguments does not go with a fused RMSNorm."""
    yield from check_selection(args, "rmsnorm", _SWITCH)
    yield from check_library("rmsnorm")
    if not is_named(args, "rmsnorm", _SWITCH):
        return
    normalization = argument(args, "normalization") or "RMSNorm"
    if normalization != "RMSNorm":
        yield (
            f"a fused RMSNorm needs --normalization RMSNorm, and the model has {normalization}; set it, or "
            "drop rmsnorm from the fused operators"
        )
    if argument(args, "transformer_impl") == "transformer_engine":
        yield (
            "with --transformer-impl transformer_engine the norms are Transformer Engine's, which are fused "
            "already; drop rmsnorm from the fused operators, or use --transformer-impl local"
        )
