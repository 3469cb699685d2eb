"""Recomputing the outputs of activation functions, which only fc2's backward reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.memory.recompute_checks import check_own_module, check_recompute
from mindspeed_dsa.features.memory.switches import wanted
from mindspeed_dsa.megatron import layers, releases
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.layers import LayerOptions, check_num_layers, check_pieces, follows_pieces
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options(LayerOptions):
    """What was asked for.

    Attributes:
        verify: compare recomputed bytes with those of the forward.
    """

    verify: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(
            switched_on=bool(getattr(settings, "recompute_activation_function", False)),
            num_layers=getattr(settings, "recompute_activation_function_num_layers", None),
            follows_pieces=follows_pieces(settings),
            verify=bool(getattr(settings, "recompute_verify", False)),
        )


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


_IMPL = "mindspeed_dsa.features.memory.recompute_activation_function.mlp"
_EXPERTS = "megatron.core.transformer.moe.experts"

FEATURE = Feature(
    name="recompute-activation-function",
    summary="Frees the output of each MLP's activation function after fc2 has used it, and computes it again "
    "right before fc2's backward reads it.",
    flags=(
        Flag(
            "--recompute-activation-function",
            "Recompute the activation function of MLPs, experts and shared experts in backward.",
        ),
        Flag(
            "--recompute-activation-function-num-layers",
            "Recompute it in N layers of each pipeline stage; default: in all layers.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.mlp:MLP.forward",
            "wrap",
            f"{_IMPL}:recompute_in_mlp",
            "the activation lies between fc1 and fc2, which this calls",
            params=("hidden_states", "per_token_scale"),
            versions=releases.SERVED,
        ),
        *(
            Patch(
                f"{_EXPERTS}:{experts}.forward",
                "wrap",
                f"{_IMPL}:recompute_in_grouped_mlp",
                "Megatron's own moe_act recompute does it, in the chosen layers",
                versions=versions,
            )
            for experts, versions in (("GroupedMLP", ">=0.12.1,<0.17"), ("TEGroupedMLP", releases.SERVED))
        ),
        *layers.rows(_IMPL, releases.SERVED),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=wanted("recompute_activation_function", "recompute_activation_function_num_layers"),
    options=Options.of,
    check=check_activation,
    doc="recompute-activation-function.md",
)
