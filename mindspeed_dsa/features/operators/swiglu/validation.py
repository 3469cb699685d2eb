"""Models whose activation is another, and what is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.operators.selection import check_library, check_selection, is_named
from mindspeed_dsa.megatron.configuration import argument

_SWITCH = "use_fused_swiglu"


def check_swiglu(args: Any, _: Any) -> Iterator[str]:
    """What in a job's arguments does not go with a fused SwiGLU."""
    yield from check_selection(args, "swiglu", _SWITCH)
    yield from check_library("swiglu")
    if not is_named(args, "swiglu", _SWITCH):
        return
    if argument(args, "swiglu") is False:
        yield (
            "a fused SwiGLU needs --swiglu, and the model has another activation; add it, or drop swiglu "
            "from the fused operators"
        )
    if argument(args, "use_te_activation_func"):
        yield (
            "a fused SwiGLU and --use-te-activation-func are two kernels for the same activation; drop one "
            "of them"
        )
