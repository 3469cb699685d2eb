"""When compiled regions are wanted, and what they do not combine with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def regions_wanted(settings: Any) -> bool:
    """On with the switch, or with its list, which is then refused without it."""
    return bool(getattr(settings, "compile_regions", False) or getattr(settings, "compile_bypass", None))


def check_regions(args: Any) -> Sequence[str]:
    """Megatron's own ways of taking a layer as a whole."""
    found = []
    if getattr(args, "cuda_graph_impl", "none") not in (None, "none") or getattr(
        args, "enable_cuda_graph", False
    ):
        found.append(
            "--compile-regions compiles at the first steps, which a CUDA graph cannot record; omit "
            "--cuda-graph-impl, or --compile-regions"
        )
    return found
