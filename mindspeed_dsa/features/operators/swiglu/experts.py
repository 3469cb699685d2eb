"""Experts that are called one by one, with one activation for the rows of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.operators.swiglu.activation import is_plain_swiglu
from mindspeed_dsa.features.operators.swiglu.feature import Options
from mindspeed_dsa.megatron.attribute_override import AttributeOverride, Function
from mindspeed_dsa.megatron.gathered_weights import waits_for_weights
from mindspeed_dsa.megatron.inlinable import linears_of
from mindspeed_dsa.ops.grouped_matmul.apart import multiply_apart


def activate_together(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``SequentialMLP.forward``: it sees one expert, whose linear layers are those of all experts.

    What lies around the expert, and what the expert does between its linear layers, stays Megatron's.
    """

    def forward(self: Any, rows: Tensor, tokens_per_expert: Any, probs: Tensor) -> Any:
        if context.options.apart or not _can_be_one(self, context.megatron):
            return original(self, rows, tokens_per_expert, probs)
        experts, counts = self.local_experts, tokens_per_expert.tolist()
        first = experts[0]
        joint = AttributeOverride(
            first,
            linear_fc1=_of_each([each.linear_fc1 for each in experts], counts, context.megatron),
            linear_fc2=_of_each([each.linear_fc2 for each in experts], counts, context.megatron),
        )
        one = partial(type(first).forward, joint)
        as_one = AttributeOverride(self, num_local_experts=1, local_experts=[one])
        return original(as_one, rows, tokens_per_expert, probs)

    return forward


def _of_each(linears: Sequence[Any], counts: list[int], megatron: Megatron) -> Function:
    """Linear layers as one: those that do nothing but multiply are not called, others are."""

    def products(rows: Tensor) -> tuple[Tensor, None]:
        plain = linears_of(linears, megatron)
        if plain is None or torch.is_autocast_enabled(rows.device.type) or plain[0].dtype != rows.dtype:
            parts = rows.split(counts)
            return torch.cat([linear(part)[0] for linear, part in zip(linears, parts, strict=True)]), None
        return multiply_apart(rows, plain, counts), None

    return Function(products)


def _can_be_one(experts: Any, megatron: Megatron) -> bool:
    """Whether all experts compute SwiGLU, and nothing but their linear layers tells them from each other."""
    config = experts.config
    if experts.num_local_experts == 1 or config.add_bias_linear:
        return False
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):  # which pads the rows of each
        return False
    mlp = megatron("core.transformer.mlp").MLP  # a class derived from it may add what one expert alone has
    return all(
        type(each) is mlp and is_plain_swiglu(each, config) and not _has_hooks(each)
        for each in experts.local_experts
    )


def _has_hooks(expert: Any) -> bool:
    return bool(
        expert._forward_hooks
        or expert._backward_hooks
        or expert._backward_pre_hooks
        or "forward" in vars(expert)
        or not all(map(waits_for_weights, expert._forward_pre_hooks.values()))
    )
