"""What does not combine with the checkpoint without output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.memory.recompute_checks import check_precision_and_graphs
from mindspeed_dsa.features.memory.recompute_outputs.options import Options
from mindspeed_dsa.integration.configuration import argument


def recomputes_experts(settings: Any) -> bool:
    """Whether Megatron's grouped experts recompute their activation, which they do with this checkpoint."""
    return "moe_act" in (getattr(settings, "recompute_modules", None) or ())


def check_outputs(args: Any, options: Options) -> Iterator[str]:
    """Problems of ``--recompute-verify`` where it is used with Megatron's own modules alone."""
    if argument(args, "recompute_verify"):
        yield from check_precision_and_graphs(args, "--recompute-verify")
    elif recomputes_experts(args):
        yield from check_precision_and_graphs(args, "--recompute-modules moe_act")
