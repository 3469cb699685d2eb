"""Activation and checks of gradient accumulation fusion without Apex."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from mindspeed_dsa import platforms
from mindspeed_dsa.megatron.configuration import argument

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


def check_embedding(args: Any) -> list[str]:
    """Report arguments that have Megatron import Apex' module itself."""
    if not argument(args, "gradient_accumulation_fusion"):
        return []
    if not argument(args, "defer_embedding_wgrad_compute"):
        return []
    return [
        f"--defer-embedding-wgrad-compute has Megatron import {EXTENSION}, which is not installed; omit it"
    ]
