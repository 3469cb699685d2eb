"""Weight gradients of FSDP2's units, computed when a schedule has time for them.

A weight's gradient needs the layer's input and the gradient of its output, and not the weight: backward drops
the gathered weight as ever, and what is computed later is reduced to its owners like any other gradient.
Linear functions defer theirs (``parallel/weight_gradients.py``); :class:`Late` has those of one unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.parallel.weight_gradients import DeferredGradient, Gradient, defer_gradients


class _QueuedGradient(DeferredGradient):
    """A deferred gradient that adds no autograd node, so that backward does not reach the weight."""

    def __init__(self, weight: Tensor, queue: list[tuple[Tensor, Gradient]]) -> None:
        self.weight, self.taken = weight, False
        self.edge = weight.new_empty(0).requires_grad_()
        self._queue = queue

    def defer(self, gradient: Gradient) -> Tensor:
        self._queue.append((self.weight, gradient))
        return self.weight.new_empty(0)


class Late:
    """Gradients of one unit's weights that backward leaves uncomputed.

    Args:
        unit: ``FSDPModule``.
        without: modules inside it whose weights take their gradients as ever.
    """

    def __init__(self, unit: Any, without: Iterable[Any] = ()) -> None:
        self._groups = groups_of(unit)
        apart = set(without)
        weights = [each for group in self._groups for each in group.fsdp_params]
        self._weights = [each for each in weights if each._module_info.module not in apart]
        self._queue: list[tuple[Tensor, Gradient]] = []

    def deferred(self) -> AbstractContextManager[Collection[DeferredGradient]]:
        """Functions that are called in the block leave them here; the weights are gathered."""
        weights = [each.unsharded_param for each in self._weights]
        return defer_gradients(weights, lambda weight: _QueuedGradient(weight, self._queue))

    def __len__(self) -> int:
        """Gradients to be computed."""
        return len(self._queue)

    @torch.no_grad()
    def run(self) -> None:
        """Compute them, and start to reduce all gradients that the unit has.

        Its weights may be in use for another microbatch meanwhile.
        """
        while self._queue:
            weight, gradient = self._queue.pop(0)  # each lets go of its operands as soon as it is done
            found = gradient()
            del gradient
            if found is not None:
                weight.grad = found if weight.grad is None else weight.grad + found
        for group in self._groups:
            _reduce(group)

    def drop(self) -> None:
        """Forget those of a step that failed."""
        self._queue.clear()


def groups_of(unit: Any) -> list[Any]:
    """``FSDPParamGroup`` of a unit."""
    found: list[Any] = unit._get_fsdp_state()._fsdp_param_groups
    return found


def _reduce(group: Any) -> None:
    """What FSDP2 does at the end of a unit's backward, with weights and state left as they are."""
    state, reshards = group._training_state, group.reshard_after_backward
    group.reshard_after_backward = False
    try:
        group.post_backward()
    finally:
        group._training_state, group.reshard_after_backward = state, reshards
