"""Fusions that Megatron has on by default, and that MindSpeed's scripts do not switch off."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.features.platform.gradient_fusion import validation as gradient_fusion

_FUSIONS = {
    "gradient_accumulation_fusion": gradient_fusion.EXTENSION,
    "masked_softmax_fusion": "scaled_masked_softmax_cuda",
    "apply_rope_fusion": "transformer_engine",
}
"""Arguments, and the modules without which Megatron stops; MindSpeed has operators of NPUs in their place."""


def switch_off_missing_fusions(args: Any) -> Sequence[str]:
    """Switch off what cannot run here; ``Feature.rewrite``. The results are the same."""
    missing = [
        (name, module)
        for name, module in _FUSIONS.items()
        if getattr(args, name, False) and find_spec(module) is None
        if not (module == gradient_fusion.EXTENSION and gradient_fusion.serves(args))
    ]
    for name, _ in missing:
        setattr(args, name, False)
    return [f"{name} is switched off: {module} is not installed" for name, module in missing]
