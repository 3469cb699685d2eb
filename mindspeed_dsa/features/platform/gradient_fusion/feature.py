"""Gradient accumulation fusion of linear layers without Apex, whose extension there is for CUDA only."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.settings import PLATFORM

EXTENSION = "fused_weight_gradient_mlp_cuda"
"""Apex' module of the kernels, which is taken where it is installed."""
_OTHERS = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
"""Data parallelism whose gradients have no buffer to be added to."""


def wanted(settings: Any) -> bool:
    """Whether it is asked for; by default on NPUs, unless gradients have no buffer."""
    return _serves(settings, settings.platform)


def serves(args: Any) -> bool:
    """Whether it is on in a job with these arguments, on the platform of this process."""
    return _serves(args, platforms.current().name)


def _serves(source: Any, platform: str) -> bool:
    if find_spec(EXTENSION) is not None:
        return False
    choice = getattr(source, "gemm_gradient_accumulation_fusion", None)
    if choice is not None:
        return bool(choice)
    return platform == "npu" and not any(getattr(source, name, False) for name in _OTHERS)


def check_embedding(args: Any, options: Any) -> list[str]:
    """Report arguments that have Megatron import Apex' module itself."""
    if not argument(args, "gradient_accumulation_fusion"):
        return []
    if not argument(args, "defer_embedding_wgrad_compute"):
        return []
    return [
        f"--defer-embedding-wgrad-compute has Megatron import {EXTENSION}, which is not installed; omit it"
    ]


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
    check=check_embedding,
    doc="gradient-accumulation-fusion.md",
)
