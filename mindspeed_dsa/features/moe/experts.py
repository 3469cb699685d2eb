"""Local experts one by one, for features that compute with one expert's weights, its own or another's."""

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
    """A weight of one expert: a parameter, or one entry of a parameter in which several are stacked."""

    parameter: Tensor
    index: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of ``whole``, a tensor of the parameter's shape, that belongs to this weight."""
        return whole if self.index is None else whole[self.index]


@runtime_checkable
class SingleExperts(Protocol):
    """Experts that can be had one by one; a module of stacked weights may have these methods itself."""

    def expert_weights(self, expert: int) -> tuple[WeightSlice, ...]:
        """Return the weights of a local expert, each contiguous; of the same shapes for all experts."""

    def run_expert(self, weights: Sequence[Tensor], rows: Tensor, probs: Tensor) -> Tensor:
        """Return one expert's output for rows that all go to it.

        Args:
            weights: of any expert of the layer, in the order of :meth:`expert_weights`. They are no
                parameters: their gradients go through autograd, whatever the layer's own do.
            rows: ``[rows, hidden]``.
            probs: ``[rows]``, by which the output is scaled.

        Returns:
            ``[rows, hidden]``.
        """

    def wait_for_weights(self) -> None:
        """Return when the weights are those of this step, under overlapped parameter gathering."""


def single_experts(experts: Any) -> SingleExperts:
    """Return the experts of a MoE layer, one by one.

    Args:
        experts: Megatron's ``SequentialMLP``, or a module with the methods itself.

    Raises:
        SettingsError: any other module.
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
    """Megatron's ``SequentialMLP``: one MLP for each expert."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def expert_weights(self, expert: int) -> tuple[WeightSlice, ...]:
        return tuple(WeightSlice(weight) for weight in self._experts.local_experts[expert].parameters())

    def run_expert(self, weights: Sequence[Tensor], rows: Tensor, probs: Tensor) -> Tensor:
        # The call goes through a local expert, so that whatever is patched or hooked there stays in force.
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
    """Switch off gradient accumulation fusion, which looks for a buffer that such weights do not have."""
    with ExitStack() as undo:
        for module in expert.modules():
            if getattr(module, "gradient_accumulation_fusion", False):
                module.gradient_accumulation_fusion = False
                undo.callback(setattr, module, "gradient_accumulation_fusion", True)
        yield
