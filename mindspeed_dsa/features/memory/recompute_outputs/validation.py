"""What does not combine with the checkpoint without output."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.features.memory.recompute_checks import check_precision_and_graphs
from mindspeed_dsa.features.memory.recompute_outputs.options import Options
from mindspeed_dsa.megatron.configuration import argument

_NEED_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "gdn_norm_out", "gdp_qkv")
"""Modules whose checkpoint Megatron constructs without saying that there is no fp8, from 0.14 on."""


def recomputes_without_engine(settings: Any) -> bool:
    """Whether modules of Megatron are recomputed with its checkpoint, which does not run here.

    With Transformer Engine it runs, in fp8 too, and is left as it is.
    """
    return bool(_modules(settings)) and find_spec("transformer_engine") is None


def _modules(settings: Any) -> list[str]:
    modules = getattr(settings, "recompute_modules", None) or ()
    return [name for name in _NEED_TRANSFORMER_ENGINE if name in modules]


def check_outputs(args: Any, options: Options) -> Iterator[str]:
    """Problems of ``--recompute-verify`` where it is used with Megatron's own modules alone."""
    if argument(args, "recompute_verify"):
        yield from check_precision_and_graphs(args, "--recompute-verify")
    elif recomputes_without_engine(args) and argument(args, "recompute_granularity") == "selective":
        modules = " ".join(_modules(args))
        yield from check_precision_and_graphs(
            args, f"--recompute-modules {modules} without Transformer Engine"
        )
