"""Weights that arrive just before a layer's forward, as with Megatron's overlapped parameter gathering."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def send_for(model: Any) -> None:
    """Make all weights NaN until the hooks before their modules' forward, where Megatron waits for them."""
    for module in model.modules():
        weights = list(module.parameters(recurse=False))
        kept = [weight.clone() for weight in weights]

        def arrive(*unused: Any, weights: Any = weights, kept: Any = kept) -> None:
            with torch.no_grad():
                for weight, value in zip(weights, kept, strict=True):
                    weight.copy_(value)

        for weight in weights:
            weight.fill_(float("nan"))
        module.register_forward_pre_hook(arrive)
