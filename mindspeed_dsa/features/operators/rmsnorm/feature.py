"""``--use-fused-rmsnorm``: Megatron's local RMSNorm, and the one that is part of a linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.operators.selection import (
    FUSED_OPERATORS,
    check_library,
    check_selection,
    is_named,
    selects,
)
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.spec import Patch

_SWITCH = "use_fused_rmsnorm"


def check_rmsnorm(args: Any, options: Any) -> Iterator[str]:
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


_IMPL = "mindspeed_dsa.features.operators.rmsnorm.norm"

FEATURE = Feature(
    name="fused-rmsnorm",
    summary="RMSNorm is one operator forward and one backward, and keeps its input and a number for each row "
    "in place of intermediate results.",
    flags=(Flag("--use-fused-rmsnorm", "Fuse RMSNorm."), FUSED_OPERATORS),
    patches=(
        Patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "wrap",
            f"{_IMPL}:build_fused_norm",
            "PyTorch's RMSNorm is half a dozen operations, of which backward keeps the results",
            params=("config", "hidden_size", "eps"),
            versions=releases.SERVED,
            priority=100,  # outside of what makes PyTorch's norms fit
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            "wrap",
            f"{_IMPL}:fuse_in_linear_layers",
            "our linear layers with a norm of their own compute it with PyTorch's function",
            versions=releases.SERVED,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=selects("rmsnorm", "use_fused_rmsnorm"),
    check=check_rmsnorm,
    doc="fused-operators.md",
)
