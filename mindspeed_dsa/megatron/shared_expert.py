"""The shared expert, run while other work is under way: its output, postponed, and its two halves.

Megatron's steps hand the output on before it is needed, so something stands for it until it is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from mindspeed_dsa.feature import Megatron


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
        """Output, once it is computed: before the last of Megatron's steps, which adds it."""
        assert self._output is not None
        return self._output

    def __radd__(self, routed: Tensor) -> Tensor:
        """Add it to the routed experts' output, as the last of Megatron's steps does."""
        return routed + self.tensor


def before_second_half(layer: Any, between: Callable[..., None]) -> contextlib.ExitStack:
    """Call ``between`` when the shared expert of a ``MoELayer`` reaches fc2; until the result is closed.

    One that is recomputed stays in one piece: its forward runs twice, and what is between must not.
    """
    stack = contextlib.ExitStack()
    fc2 = getattr(layer.shared_experts, "linear_fc2", None)
    if fc2 is not None and not is_recomputed(layer):
        stack.callback(fc2.register_forward_pre_hook(between).remove)
    return stack


def shared_expert_of(layer: Any, megatron: Megatron) -> Callable[[Tensor], Tensor]:
    """Return a ``MoELayer``'s shared expert, which backward recomputes where Megatron does."""
    if not is_recomputed(layer):
        compute: Callable[[Tensor], Tensor] = layer.shared_experts
        return compute
    checkpoint = megatron("core.tensor_parallel").checkpoint
    return partial(checkpoint, layer.shared_experts, False)


def is_recomputed(layer: Any) -> bool:
    """Return whether Megatron recomputes the shared expert of this ``MoELayer``."""
    return bool(getattr(layer, "shared_experts_recompute", False))
