"""What does not combine with the checkpoint without output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.memory.recompute_checks import check_precision_and_graphs
from mindspeed_dsa.features.memory.recompute_outputs.options import Options


def check_outputs(args: Any, options: Options) -> Iterator[str]:
    """Problems of ``--recompute-verify`` where it is used with Megatron's own modules alone."""
    yield from check_precision_and_graphs(args, "--recompute-verify")
