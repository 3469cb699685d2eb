"""Pieces of a model of which a part does not learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def run_what_learns(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``ScheduleNode.default_backward_func``: autograd refuses tensors without a graph.

    Below the first weight that learns there are pieces without any, such as a frozen embedding.
    """

    def default_backward_func(self: Any, outputs: Sequence[Tensor], output_grad: Any) -> Any:
        learning = [each.requires_grad for each in outputs]
        if all(learning):
            return original(self, outputs, output_grad)
        kept = [
            pair
            for pair, learns in zip(zip(outputs, output_grad, strict=True), learning, strict=True)
            if learns
        ]
        if kept:
            original(self, *zip(*kept, strict=True))
        return output_grad

    return default_backward_func
