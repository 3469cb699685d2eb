"""When Adam's step is one operator."""

from __future__ import annotations

from typing import Any

_OTHERS = ("swap_optimizer", "virtual_optimizer", "use_torch_fsdp2")
"""Steps of their own, on moments that are elsewhere, or parameters that are not plain tensors."""


def wanted(settings: Any) -> bool:
    """Whether it is asked for; by default on NPUs, unless another feature has a step of its own."""
    if settings.fused_adam is not None:
        return bool(settings.fused_adam)
    return settings.platform == "npu" and not any(getattr(settings, name, False) for name in _OTHERS)
