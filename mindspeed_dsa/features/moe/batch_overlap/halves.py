"""Two halves of the tokens of one MoE layer, and the order in which they compute and travel.

The order of creation decides the order of backward (``parallel/all_to_all.py``). Forward creates, for the
halves 0 and 1,

    start dispatch 0, deferred gradients of the experts, shared fc1 and activation, wait for dispatch 0,
    start dispatch 1, experts 0, start combine 0, wait for dispatch 1, experts 1, wait for combine 0,
    start combine 1, shared fc2 and gate, wait for combine 1

so dispatch 1 and combine 0 travel under the experts of the other half, and dispatch 0 and combine 1, which
have no other half above them, under the shared expert. Backward runs the experts of half 1 under combine 0,
those of half 0 under dispatch 1, and the weights' gradients of both under dispatch 0. All of the shared
expert is under combine 1 there: that transfer gives way to fc1, too, unless the experts' weights take no
part.

No transfer is started before the work that hides the one before it: on a link that two share, the one that is
waited for first arrives later, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_dsa.megatron.shared_expert import SharedOutput, before_second_half
from mindspeed_dsa.parallel.all_to_all import InFlight, launching
from mindspeed_dsa.parallel.names import named, of_half
from mindspeed_dsa.parallel.weight_gradients import defer_gradients

Mode = Literal["whole", "in turn", "interleaved"]
"""Execution modes of a layer; in turn, each transfer of a half is waited for at once."""
Experts = Callable[[Any, Tensor, Tensor], Tensor]
"""Runs the routed experts: gets a dispatcher, and rows and probabilities that it has dispatched."""


class Half:
    """Half of the tokens of one forward.

    Megatron's dispatcher keeps one forward in its attributes, so each half has a copy of it.

    Args:
        number: of the half, 0 or 1.
        dispatcher: Megatron's.
        rows: ``[tokens, hidden]``.
        routing_map: ``[tokens, experts]``.
        probs: ``[tokens, experts]``.
        waits: whether transfers are waited for where they are started.
    """

    def __init__(
        self, number: int, dispatcher: Any, rows: Tensor, routing_map: Tensor, probs: Tensor, *, waits: bool
    ) -> None:
        self._number, self._dispatcher, self._waits = number, copy.copy(dispatcher), waits
        self.dispatched: list[InFlight] = []
        self.combined: list[InFlight] = []
        self._arrived: list[Tensor] = []
        # By expert from here on. Counts are exchanged now: under a transfer they would be waited for longer.
        with of_half(number):
            self._permuted = self._dispatcher.dispatch_preprocess(rows, routing_map, probs)

    def dispatch(self) -> None:
        """Send rows and probabilities to their experts."""
        with of_half(self._number), named("dispatch"), launching(self.dispatched):
            self._dispatcher.token_dispatch(*self._permuted)
        self._permuted = None
        self._wait_now(self.dispatched)

    def arrive(self) -> None:
        """Wait for them."""
        self._arrived = [flight.wait() for flight in self.dispatched]

    def compute(self, experts: Experts) -> Tensor:
        """Return the outputs of this rank's experts, ``[rows, hidden]``."""
        (rows, probs), self._arrived = self._arrived, []
        return experts(self._dispatcher, rows, probs)

    def combine(self, output: Tensor, after: Tensor | None = None) -> None:
        """Send outputs back to their tokens; in backward, before the transfer that ``after`` marks."""
        with of_half(self._number), named("combine"), launching(self.combined, after):
            self._dispatcher.token_combine(output)
        self._wait_now(self.combined)

    def finish(self, combined: Tensor) -> Tensor:
        """Return the outputs of the tokens, ``[tokens, hidden]``."""
        output: Tensor = self._dispatcher.combine_postprocess(combined)
        return output

    def _wait_now(self, flights: list[InFlight]) -> None:
        for flight in flights:
            if self._waits and flight.forward is not None:
                flight.forward.wait()


def run(layer: Any, halves: tuple[Half, Half], experts: Experts, shared: SharedOutput | None) -> Tensor:
    """Run the routed experts, and the shared expert beside them; return ``[tokens, hidden]``.

    Args:
        layer: Megatron's ``MoELayer``.
        halves: its tokens, in their order.
        experts: the routed ones.
        shared: what stands for the shared expert's output.
    """
    first, second = halves
    combined: list[Tensor] = []

    def between(*_: Any) -> None:
        if combined:
            return
        first.arrive()
        second.dispatch()
        first.combine(first.compute(experts))
        second.arrive()
        output = second.compute(experts)
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
