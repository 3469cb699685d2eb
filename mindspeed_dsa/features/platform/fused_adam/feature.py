"""Adam's step in one operator, where Megatron has torch's optimizer: neither Transformer Engine nor Apex."""

from __future__ import annotations

from typing import Any

from mindspeed_dsa.feature import Conflict, Feature, Flag
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.settings import PLATFORM

_OTHERS = ("swap_optimizer", "virtual_optimizer", "use_torch_fsdp2")
"""Steps of their own, on moments that are elsewhere, or parameters that are not plain tensors."""


def wanted(settings: Any) -> bool:
    """Whether it is asked for; by default on NPUs, unless another feature has a step of its own."""
    if settings.fused_adam is not None:
        return bool(settings.fused_adam)
    return settings.platform == "npu" and not any(getattr(settings, name, False) for name in _OTHERS)


_OPTIMIZER = "megatron.core.optimizer.optimizer"
_STEP = "mindspeed_dsa.features.platform.fused_adam.step:step_in_one_operator"
_WHY = "torch's Adam makes temporary tensors as large as all weights, one operation after another"

FEATURE = Feature(
    name="fused-adam",
    summary="Adam's step in one operator where Megatron has torch's optimizer.",
    flags=(
        Flag(
            "--fused-adam",
            "Adam's step in one operator, without Transformer Engine and Apex. Default: on on NPUs.",
            kind="auto",
        ),
        PLATFORM,
    ),
    conflicts=tuple(
        Conflict(name, "it has a step of its own, on moments that are elsewhere; omit --fused-adam")
        for name in ("swap-optimizer", "virtual-optimizer")
    ),
    patches=tuple(
        Patch(f"{_OPTIMIZER}:{name}.step_with_ready_grads", "wrap", _STEP, _WHY)
        for name in ("MixedPrecisionOptimizer", "FP32Optimizer")
    ),
    active=wanted,
    doc="fused-adam.md",
)
