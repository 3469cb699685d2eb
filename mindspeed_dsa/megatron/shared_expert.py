"""Postponed execution of the shared expert, so that it overlaps with other work.

Megatron computes the shared expert's output early, and adds it to the routed experts' output at the end of
the MoE layer. Here a placeholder (:class:`SharedOutput`) is passed instead, and the shared expert runs later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.megatron.releases import recomputes_shared_experts


class SharedOutput:
    """Placeholder that Megatron's MoE layer gets instead of the shared expert's output, and adds at its end.

    Args:
        compute: function that runs the shared expert.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._output: Tensor | None = None

    def compute(self) -> None:
        """Run the shared expert."""
        self._output = self._compute()

    @property
    def tensor(self) -> Tensor:
        """Shared expert's output; available after :meth:`compute`."""
        assert self._output is not None
        return self._output

    def __radd__(self, routed: Tensor) -> Tensor:
        """Return ``routed + output``: Megatron adds the placeholder to the routed experts' output."""
        return routed + self.tensor


def before_second_half(layer: Any, between: Callable[..., None]) -> contextlib.ExitStack:
    """Hook ``between`` before fc2 of a ``MoELayer``'s shared expert; closing the stack removes the hook."""
    # A recomputed shared expert is left alone: its forward runs twice, and `between` must run once.
    stack = contextlib.ExitStack()
    fc2 = getattr(layer.shared_experts, "linear_fc2", None)
    # Closing the stack removes the hook.
    if fc2 is not None and not recomputes_shared_experts(layer):
        stack.callback(fc2.register_forward_pre_hook(between).remove)
    return stack


def shared_expert_of(layer: Any, megatron: Megatron) -> Callable[[Tensor], Tensor]:
    """Return a ``MoELayer``'s shared expert, checkpointed if Megatron recomputes it."""
    if not recomputes_shared_experts(layer):
        compute: Callable[[Tensor], Tensor] = layer.shared_experts
        return compute
    checkpoint = megatron("core.tensor_parallel").checkpoint
    return partial(checkpoint, layer.shared_experts, False)
