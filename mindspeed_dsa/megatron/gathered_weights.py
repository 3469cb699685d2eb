"""Weights that are read without calling the layer that holds them, or on another stream than its own."""

from __future__ import annotations

from typing import Any

_OVERLAPPED_GATHERING = "core.distributed.distributed_data_parallel"
"""Module of the hooks that wait for weights under ``--overlap-param-gather``."""


def wait_for_weights(layer: Any) -> None:
    """Run a layer's hooks before its forward.

    Under overlapped parameter gathering Megatron waits for a layer's weights in such a hook; without it
    they are those of the step before.
    """
    for number, hook in list(layer._forward_pre_hooks.items()):
        hook(layer, (), *([{}] if number in layer._forward_pre_hooks_with_kwargs else []))


def waits_for_weights(hook: Any) -> bool:
    """Return whether a hook before a forward is Megatron's wait for the layer's weights."""
    return getattr(hook, "__module__", "").endswith(_OVERLAPPED_GATHERING)


def wait_for_all_weights(module: Any) -> None:
    """Let the current stream wait for the weights of a module and of those inside of it.

    Megatron waits once for a bucket of weights, on the stream of the layer that is first to need it; those
    after it find nothing to wait for.
    """
    for layer in module.modules():
        for hook in list(layer._forward_pre_hooks.values()):
            if waits_for_weights(hook):
                hook(layer, ())
