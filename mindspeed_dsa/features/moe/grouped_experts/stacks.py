"""Which parameters are stacks of experts' matrices, and how these lie in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.ops.grouped_matmul import Layout

_ATTRIBUTE = "stacks_experts"


@dataclass(frozen=True, eq=False)
class Stack:
    """What a stacked parameter says of itself.

    Attributes:
        layout: of each expert's matrix.
        experts: the same object for all stacks of one module's experts.
    """

    layout: Layout
    experts: object

    def by_expert(self, stack: Tensor) -> list[Tensor]:
        """Views ``[out, in]`` of a tensor as large as the parameter, as the experts' own layers have them."""
        return list((stack if self.layout == "nk" else stack.transpose(1, 2)).unbind())

    def stack(self, matrices: Sequence[Tensor]) -> Tensor:
        """The reverse of :meth:`by_expert`, in memory of its own."""
        return torch.stack([matrix if self.layout == "nk" else matrix.T for matrix in matrices])

    def mark(self, parameter: Tensor) -> None:
        """Note it at the parameter."""
        setattr(parameter, _ATTRIBUTE, self)


def stack_of(parameter: Any) -> Stack | None:
    """What :meth:`Stack.mark` has noted."""
    return getattr(parameter, _ATTRIBUTE, None)


def runs(parameters: Iterable[Any]) -> Iterator[list[Any]]:
    """Neighbours that are stacks of the same experts, together; all others one by one."""
    for _, run in groupby(parameters, _together):
        yield list(run)


def _together(parameter: Any) -> int:
    stack = stack_of(parameter)
    return id(parameter if stack is None else stack.experts)
