"""What does not combine with recomputed norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.memory.recompute_checks import check_own_module, check_recompute
from mindspeed_dsa.features.memory.recompute_norm.options import Options
from mindspeed_dsa.megatron.layers import check_num_layers, check_pieces

_FLAG = "--recompute-norm"


def check_norm(args: Any, options: Options) -> Iterator[str]:
    """What in arguments, or in a model's configuration, does not combine with the feature."""
    yield from check_num_layers(args, options, _FLAG)
    yield from check_recompute(args, _FLAG)
    yield from check_pieces(args, options, _FLAG)
    yield from check_own_module(args, _FLAG, "layernorm")
