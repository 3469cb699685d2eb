"""What does not combine with recomputed activation functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.memory.recompute_activation_function.options import Options
from mindspeed_dsa.features.memory.recompute_checks import check_own_module, check_recompute
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.layers import check_num_layers, check_pieces

_FLAG = "--recompute-activation-function"


def check_activation(args: Any, options: Options) -> Iterator[str]:
    """What in arguments, or in a model's configuration, does not combine with the feature."""
    yield from check_num_layers(args, options, _FLAG)
    yield from check_recompute(args, _FLAG)
    yield from check_pieces(args, options, _FLAG)
    yield from check_own_module(args, _FLAG, "moe_act")
    if argument(args, "use_transformer_engine_op_fuser"):
        yield (
            f"{_FLAG}: with --use-transformer-engine-op-fuser the activation is inside one operation with "
            "both linear layers and has no output of its own; drop one of them"
        )
