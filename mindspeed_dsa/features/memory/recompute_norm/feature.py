"""Recomputing the outputs of norms, which only their consumer's backward reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.memory.recompute_checks import check_own_module, check_recompute
from mindspeed_dsa.features.memory.switches import wanted
from mindspeed_dsa.megatron import layers, releases
from mindspeed_dsa.megatron.layers import LayerOptions, check_num_layers, check_pieces, follows_pieces
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options(LayerOptions):
    """What was asked for."""

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(
            switched_on=bool(getattr(settings, "recompute_norm", False)),
            num_layers=getattr(settings, "recompute_norm_num_layers", None),
            follows_pieces=follows_pieces(settings),
        )


_FLAG = "--recompute-norm"


def check_norm(args: Any, options: Options) -> Iterator[str]:
    """What in arguments, or in a model's configuration, does not combine with the feature."""
    yield from check_num_layers(args, options, _FLAG)
    yield from check_recompute(args, _FLAG)
    yield from check_pieces(args, options, _FLAG)
    yield from check_own_module(args, _FLAG, "layernorm")


_IMPL = "mindspeed_dsa.features.memory.recompute_norm.layer"

FEATURE = Feature(
    name="recompute-norm",
    summary="Frees the outputs of a layer's two norms after their consumers have used them, and computes "
    "them again right before the consumers' backward reads them.",
    flags=(
        Flag("--recompute-norm", "Recompute the input norm and the norm before the MLP in backward."),
        Flag(
            "--recompute-norm-num-layers",
            "Recompute them in N layers of each pipeline stage; default: in all layers.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_IMPL}:recompute_norms",
            "Megatron's own layernorm recompute does it, in the chosen layers",
            versions=releases.SERVED,
        ),
        *layers.rows(_IMPL, releases.SERVED),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=wanted("recompute_norm", "recompute_norm_num_layers"),
    options=Options.of,
    check=check_norm,
    doc="recompute-norm.md",
)
