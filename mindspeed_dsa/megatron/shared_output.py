"""The shared expert, run while other work is under way, where Megatron's steps hand on its output before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor


class SharedOutput:
    """Stands for the output until it is computed, in the steps that only pass it on.

    Args:
        compute: runs the shared expert.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._output: Tensor | None = None

    def compute(self) -> None:
        """Run the shared expert."""
        self._output = self._compute()

    @property
    def tensor(self) -> Tensor:
        """The output, once it is computed: before the last of Megatron's steps, which adds it."""
        assert self._output is not None
        return self._output

    def __radd__(self, routed: Tensor) -> Tensor:
        """What Megatron does with it in the end: ``routed + shared``."""
        return routed + self.tensor


def before_second_half(layer: Any, between: Callable[..., None]) -> contextlib.ExitStack:
    """Call ``between`` when a layer's shared expert reaches fc2; until the result is closed.

    One that is recomputed stays in one piece: its forward runs twice, and what is between must not.
    """
    stack = contextlib.ExitStack()
    fc2 = getattr(layer.shared_experts, "linear_fc2", None)
    if fc2 is not None and not is_recomputed(layer):
        stack.callback(fc2.register_forward_pre_hook(between).remove)
    return stack


def is_recomputed(layer: Any) -> bool:
    """Whether Megatron recomputes the shared expert of this ``MoELayer``."""
    return bool(getattr(layer, "shared_experts_recompute", False))
