"""``--use-fused-rmsnorm``: Megatron's local RMSNorm, and the one that is part of a linear layer."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.operators.rmsnorm.validation import check_rmsnorm
from mindspeed_dsa.features.operators.selection import FUSED_OPERATORS, selects
from mindspeed_dsa.megatron import configuration, releases
from mindspeed_dsa.patches.spec import Patch

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
    validate=configuration.validate(check_rmsnorm),
    doc="fused-operators.md",
)
FEATURES = (FEATURE,)
