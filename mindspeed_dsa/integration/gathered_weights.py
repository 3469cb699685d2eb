"""Weights that are read without calling the layer that holds them."""

from __future__ import annotations

from typing import Any


def wait_for_weights(layer: Any) -> None:
    """Run a layer's hooks before its forward.

    Under overlapped parameter gathering Megatron waits for a layer's weights in such a hook; without it
    they are those of the step before.
    """
    for number, hook in list(layer._forward_pre_hooks.items()):
        hook(layer, (), *([{}] if number in layer._forward_pre_hooks_with_kwargs else []))
