"""MoE layer that runs two halves of its tokens, with one half's all-to-all during the other's experts.

The order of forward determines the order of backward (see ``parallel/all_to_all.py``). For the halves 0 and
1, forward runs

    start dispatch 0, deferred gradients of the experts, shared fc1 and activation, wait for dispatch 0,
    start dispatch 1, experts 0, start combine 0, wait for dispatch 1, experts 1, wait for combine 0,
    start combine 1, shared fc2 and gate, wait for combine 1

In forward, the other half's experts hide dispatch 1 and combine 0, and the shared expert hides dispatch 0 and
combine 1. In backward, the experts of half 1 hide combine 0, the experts of half 0 hide dispatch 1, and the
weight gradients of both halves hide dispatch 0. The shared expert hides combine 1, including its fc1
(:meth:`InFlight.give_way`) if the experts' weight gradients can be deferred.

A transfer starts only right before the work that hides it. Two concurrent transfers would share the link, and
the one needed first would arrive later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_dsa.megatron.shared_expert import SharedOutput, before_second_half
from mindspeed_dsa.parallel.all_to_all import InFlight, launching, wait_now
from mindspeed_dsa.parallel.names import named, of_half
from mindspeed_dsa.parallel.weight_gradients import defer_gradients

Mode = Literal["whole", "in turn", "interleaved"]
"""Execution modes of a layer. ``in turn`` waits for each transfer right after its start; only measured."""
Experts = Callable[[Any, Tensor, Tensor], Tensor]
"""Function that runs the routed experts on a dispatcher, its dispatched rows and their probabilities."""


class Half:
    """Half of the tokens in one forward of an MoE layer.

    Args:
        number: index of the half, 0 or 1.
        dispatcher: Megatron's dispatcher.
        rows: hidden states, ``[tokens, hidden]``.
        routing_map: routed experts of each token, bool ``[tokens, experts]``.
        probs: routing probabilities, ``[tokens, experts]``.
        waits: whether to wait for each transfer right after its start, without overlap.
    """

    def __init__(
        self, number: int, dispatcher: Any, rows: Tensor, routing_map: Tensor, probs: Tensor, *, waits: bool
    ) -> None:
        # Megatron's dispatcher keeps the state of one forward in its attributes, so each half has a copy.
        self._number, self._dispatcher, self._waits = number, copy.copy(dispatcher), waits
        self.dispatched: list[InFlight] = []
        self.combined: list[InFlight] = []
        self._arrived: list[Tensor] = []
        # Sorts rows by expert and exchanges counts. During a transfer, the counts would take longer.
        with of_half(number):
            self._permuted = self._dispatcher.dispatch_preprocess(rows, routing_map, probs)

    def dispatch(self) -> None:
        """Start the dispatch of the hidden states and probabilities."""
        with of_half(self._number), named("dispatch"), launching(self.dispatched):
            self._dispatcher.token_dispatch(*self._permuted)
        self._permuted = None
        if self._waits:
            wait_now(self.dispatched)

    def arrive(self) -> None:
        """Wait for the dispatched hidden states and probabilities."""
        self._arrived = [flight.wait() for flight in self.dispatched]

    def compute(self, experts: Experts) -> Tensor:
        """Run this rank's experts; return their output ``[rows, hidden]``."""
        (rows, probs), self._arrived = self._arrived, []
        return experts(self._dispatcher, rows, probs)

    def combine(self, output: Tensor, after: Tensor | None = None) -> None:
        """Start the combine. ``after``: mark of an earlier transfer, see ``all_to_all.start``."""
        with of_half(self._number), named("combine"), launching(self.combined, after):
            self._dispatcher.token_combine(output)
        if self._waits:
            wait_now(self.combined)

    def finish(self, combined: Tensor) -> Tensor:
        """Return the combined output of the half's tokens, ``[tokens, hidden]``."""
        output: Tensor = self._dispatcher.combine_postprocess(combined)
        return output


def run(layer: Any, halves: tuple[Half, Half], experts: Experts, shared: SharedOutput | None) -> Tensor:
    """Run the routed experts in halves, and the shared expert; return the output ``[tokens, hidden]``.

    Args:
        layer: Megatron's ``MoELayer``.
        halves: both halves of the layer's tokens, in order.
        experts: function that runs the routed experts.
        shared: shared expert that has not run yet, or ``None``.
    """
    first, second = halves
    combined: list[Tensor] = []

    def between(*_: Any) -> None:
        if combined:
            return
        first.arrive()
        second.dispatch()
        # Experts 0 hide dispatch 1.
        first.combine(first.compute(experts))
        second.arrive()
        # Experts 1 hide combine 0.
        output = second.compute(experts)
        # The mark: in backward combine 0 is reversed only after combine 1, despite give_way.
        rows, mark = first.combined[0].wait_and_mark()
        combined.append(rows)
        second.combine(output, after=mark)
        if any(gradient.taken for gradient in deferred):
            second.combined[0].give_way(first.dispatched[0])

    first.dispatch()
    with defer_gradients(layer.experts.parameters()) as deferred:
        if shared is not None:
            with before_second_half(layer, between):
                shared.compute()
        between()
    begin = first.finish(combined[0])
    return torch.cat((begin, second.finish(second.combined[0].wait())))
