"""Gradient accumulation fusion of linear layers without Apex, whose extension there is for CUDA only."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.platform.gradient_fusion.validation import (
    EXTENSION,
    check_embedding,
    wanted,
)
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.settings import PLATFORM

_LAYERS = "megatron.core.tensor_parallel.layers"

FEATURE = Feature(
    name="gradient-accumulation-fusion",
    summary="Megatron's linear layers add weight gradients to main_grad themselves, without Apex.",
    flags=(
        Flag(
            "--gemm-gradient-accumulation-fusion",
            "Have Megatron's gradient accumulation fusion where Apex' extension is not installed. "
            "Default: on on NPUs, without FSDP2.",
            kind="auto",
        ),
        PLATFORM,
    ),
    patches=(
        Patch(
            f"{_LAYERS}:__dict__",
            "entry",
            "mindspeed_dsa.features.platform.gradient_fusion.kernels:Kernels",
            "what linear layers call in backward; Apex' extension is for CUDA",
            key=EXTENSION,
        ),
        Patch(
            f"{_LAYERS}:_grad_accum_fusion_available",
            "value",
            "builtins:True",
            "linear layers refuse the fusion unless the module has been imported",
        ),
    ),
    active=wanted,
    validate=check_embedding,
    doc="gradient-accumulation-fusion.md",
)
