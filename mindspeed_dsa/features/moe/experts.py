"""Access to single local experts of an MoE layer, for features that use one expert's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mindspeed_dsa.megatron.gathered_weights import wait_for_weights
from mindspeed_dsa.patches.errors import SettingsError


@dataclass(frozen=True)
class WeightSlice:
    """Weight of one expert: a whole parameter, or one index of a stacked parameter."""

    parameter: Tensor
    index: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Slice this expert's weight from ``whole``, a tensor shaped like the parameter."""
        return whole if self.index is None else whole[self.index]


@runtime_checkable
class SingleExperts(Protocol):
    """Interface that gives access to one expert at a time. Modules with stacked weights can implement it."""

    def expert_weights(self, expert: int) -> tuple[WeightSlice, ...]:
        """Return a local expert's weights, each contiguous. Shapes are the same for all experts."""

    def run_expert(self, weights: Sequence[Tensor], rows: Tensor, probs: Tensor) -> Tensor:
        """Run one expert on rows that are all routed to it.

        Args:
            weights: weights in the order of :meth:`expert_weights`, which can belong to another rank's
                expert. They need not be parameters. Autograd returns their gradients, even with gradient
                accumulation fusion.
            rows: hidden states, ``[rows, hidden]``.
            probs: factors of the output, ``[rows]``.

        Returns:
            Output ``[rows, hidden]``.
        """

    def wait_for_weights(self) -> None:
        """Wait until the overlapped parameter all-gather has delivered this step's weights."""


def single_experts(experts: Any) -> SingleExperts:
    """Return the :class:`SingleExperts` interface of an MoE layer's experts.

    Args:
        experts: Megatron's ``SequentialMLP``, or a module that implements :class:`SingleExperts`.

    Raises:
        SettingsError: ``experts`` is any other module, or uses Transformer Engine's layers.
    """
    if isinstance(experts, SingleExperts):
        return experts
    if hasattr(experts, "local_experts") and not any(map(_is_transformer_engines, experts.modules())):
        return _Sequential(experts)
    raise SettingsError(
        f"{type(experts).__name__} does not give out the weights of one expert; use the experts of "
        "--transformer-impl local"
    )


def _is_transformer_engines(module: Any) -> bool:
    return any("transformer_engine" in base.__module__ for base in type(module).__mro__)


class _Sequential:
    """Adapter for Megatron's ``SequentialMLP``, which has one MLP per expert."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def expert_weights(self, expert: int) -> tuple[WeightSlice, ...]:
        return tuple(WeightSlice(weight) for weight in self._experts.local_experts[expert].parameters())

    def run_expert(self, weights: Sequence[Tensor], rows: Tensor, probs: Tensor) -> Tensor:
        # Call through a local expert's module, so that its patches and hooks stay in force.
        expert = self._experts.local_experts[0]
        names = [name for name, _ in expert.named_parameters()]
        with _gradients_through_autograd(expert):
            output, bias = torch.func.functional_call(
                expert, dict(zip(names, weights, strict=True)), (rows, probs)
            )
        assert bias is None, "the MLP of an expert adds its bias itself"
        result: Tensor = output
        return result

    def wait_for_weights(self) -> None:
        for module in self._experts.modules():
            if module._forward_pre_hooks and next(module.parameters(recurse=False), None) is not None:
                wait_for_weights(module)


@contextmanager
def _gradients_through_autograd(expert: Any) -> Iterator[None]:
    """Context without gradient accumulation fusion, which needs ``main_grad`` on the weights."""
    with ExitStack() as undo:
        for module in expert.modules():
            if getattr(module, "gradient_accumulation_fusion", False):
                module.gradient_accumulation_fusion = False
                undo.callback(setattr, module, "gradient_accumulation_fusion", True)
        yield
