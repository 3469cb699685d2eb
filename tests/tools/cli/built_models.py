"""Models of ``try`` and ``doctor --device``, built without memory; runs in the pool's workers."""

from __future__ import annotations

import torch

from mindspeed_dsa.tools.trial import device, side
from mindspeed_dsa.tools.weights.model import built


def parameters() -> dict[str, list[str]]:
    """Return the names of each model's parameters."""
    names = {}
    for command, values in (("try", side.MODEL), ("doctor --device", device.SIZES)):
        with built(values, 512, torch.float32) as model:
            names[command] = [name for name, _ in model.named_parameters()]
    return names
