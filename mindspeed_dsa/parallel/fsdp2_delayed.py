"""Weight gradients of FSDP2's units, computed when a schedule has time for them.

A weight's gradient needs the layer's input and the gradient of its output, and not the weight: backward drops
the gathered weight as ever, and what is computed later is reduced to its owners like any other gradient. A
schedule that splits backward in two, such as a zero bubble pipeline, does::

    delayed = Delayed(units)     # once
    output = model(rows)         # linear functions leave their weight gradients at ports, see port.py
    output.backward(gradient)    # gradients of activations, and of weights of functions that know no ports
    delayed.run()                # any time later, before the optimizer's step
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.parallel.port import Gradient, Port, opened


class _LatePort(Port):
    """One that is no node between the weight and the function: backward passes the weight by."""

    def __init__(self, weight: Tensor, queue: list[tuple[Tensor, Gradient]]) -> None:
        self.weight, self.taken = weight, False
        self.edge = weight.new_empty(0).requires_grad_()
        self._queue = queue

    def later(self, gradient: Gradient) -> Tensor:
        self._queue.append((self.weight, gradient))
        return self.weight.new_empty(0)


class Delayed:
    """Weight gradients that backward leaves uncomputed, from now on.

    Args:
        units: ``FSDPModule``; all of their parameters that functions ask a port for.
    """

    def __init__(self, units: Sequence[Any]) -> None:
        self._groups = {unit: unit._get_fsdp_state()._fsdp_param_groups for unit in units}
        self._queue: list[tuple[Tensor, Gradient]] = []
        self._open: list[AbstractContextManager[Any]] = []
        for unit in units:
            # After FSDP2's own hook, which has gathered the weights.
            unit.register_forward_pre_hook(self._enter)
            unit.register_forward_hook(self._leave, always_call=True)

    def _enter(self, unit: Any, _: Any) -> None:
        weights = [each.unsharded_param for group in self._groups[unit] for each in group.fsdp_params]
        ports = opened(weights, lambda weight: _LatePort(weight, self._queue))
        ports.__enter__()
        self._open.append(ports)

    def _leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)

    def __len__(self) -> int:
        """Gradients to be computed."""
        return len(self._queue)

    @torch.no_grad()
    def run(self) -> None:
        """Compute them all, and return when this rank's pieces of their sums are in its gradients.

        Weights may be in use for another microbatch meanwhile. Every rank calls it at the same point.
        """
        groups = [group for found in self._groups.values() for group in found]
        of = {
            id(each._unsharded_param): group
            for group in groups
            for each in group.fsdp_params
            if hasattr(each, "_unsharded_param")
        }
        waiting: dict[Any, list[tuple[Tensor, Gradient]]] = {}
        while self._queue:
            weight, gradient = self._queue.pop(0)
            waiting.setdefault(of[id(weight)], []).append((weight, gradient))
        for group, gradients in waiting.items():
            while gradients:
                weight, gradient = gradients.pop(0)  # each lets go of its operands as soon as it is done
                found = gradient()
                del gradient
                weight.grad = found if weight.grad is None or found is None else weight.grad + found
            _reduce(group)
        for group in waiting:
            group._wait_for_post_backward()


def _reduce(group: Any) -> None:
    """What FSDP2 does at the end of a unit's backward, with weights and state left as they are."""
    state, reshards = group._training_state, group.reshard_after_backward
    group.reshard_after_backward = False
    try:
        group.post_backward()
    finally:
        group._training_state, group.reshard_after_backward = state, reshards
