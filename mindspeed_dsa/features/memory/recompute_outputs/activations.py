"""Recompute of MLP activation functions: outputs are freed in forward, recomputed for fc2's backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.memory import chosen_layers
from mindspeed_dsa.features.memory.recompute_outputs.checkpoint import (
    CheckpointWithoutOutput,
    RandomStates,
    keep_inputs,
    needs_gradient,
    within,
)
from mindspeed_dsa.features.memory.recompute_outputs.feature import ActivationOptions, check_activation
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.attribute_override import AttributeOverride, Function, activation_of, attributes
from mindspeed_dsa.megatron.low_precision import low_precision

_chosen: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Dict from each MLP or grouped-experts module that recomputes to its name in messages."""


def recompute_in_mlp(original: Callable[..., Any], context: Context[ActivationOptions]) -> Callable[..., Any]:
    """Decorate ``MLP.forward`` to discard and recompute the activation output.

    Megatron's forward runs unchanged, fusions included, on a proxy of the module. The computation between
    the calls of ``linear_fc1`` and ``linear_fc2`` is the activation function.
    """

    def forward(
        self: Any, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if self not in _chosen or not torch.is_grad_enabled():
            return original(self, hidden_states, per_token_scale, **kwargs)
        with contextlib.ExitStack() as without_graph, within(f"activation function of {_chosen[self]}"):
            observed = _Observed(self, per_token_scale, original, kwargs, without_graph, context)
            return original(observed, hidden_states, per_token_scale, **kwargs)

    return forward


class _Observed(AttributeOverride):
    """MLP proxy that runs the activation without a graph and gives fc2 an output that can be recomputed."""

    def __init__(
        self,
        module: Any,
        scale: Tensor | None,
        forward: Callable[..., Any],
        kwargs: dict[str, Any],
        without_graph: contextlib.ExitStack,
        context: Context[ActivationOptions],
    ) -> None:
        super().__init__(module)
        self._scale = scale
        self._forward, self._kwargs = forward, kwargs
        self._without_graph, self._context = without_graph, context
        self._inputs: tuple[Tensor | None, ...] = ()
        self._states: RandomStates | None = None

    @property
    def linear_fc1(self) -> Function:
        return Function(self._before)

    @property
    def linear_fc2(self) -> Function:
        return Function(self._after)

    def _before(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        intermediate, bias = self._module.linear_fc1(hidden_states)  # [..., ffn or 2 * ffn], [ffn or 2 * ffn]
        self._inputs = intermediate, bias, self._scale
        if needs_gradient(self._inputs):
            self._states = RandomStates(self._context.megatron)
            self._without_graph.enter_context(torch.no_grad())
        return intermediate, bias

    def _after(self, activation: Tensor) -> Any:
        self._without_graph.close()
        if self._states is None:
            return self._module.linear_fc2(activation)
        checkpoint = CheckpointWithoutOutput(self._context.megatron, self._context.options.verify)
        activation = checkpoint.attach(self._activation(), activation, self._inputs, self._states)
        output, bias = self._module.linear_fc2(activation)
        checkpoint.discard_output_and_register_recompute(output)
        return output, bias

    def _activation(self) -> Callable[..., Tensor]:
        module, forward, kwargs = self._module, self._forward, self._kwargs

        def activation(intermediate: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
            return activation_of(forward, module, bias, kwargs)(intermediate, scale)

        return activation


def recompute_in_grouped_mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``forward`` of grouped experts to enable Megatron's own ``activation_recompute``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _chosen or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        with attributes(self, activation_recompute=True), within(f"activation function of {_chosen[self]}"):
            return original(self, *args, **kwargs)

    return forward


def _choose_with(context: Context[ActivationOptions]) -> Callable[[Any], None]:
    def choose(layer: Any) -> None:
        mlp = context.megatron("core.transformer.mlp").MLP
        for name, module in _mlps(layer, (mlp, *releases.grouped_experts(context.megatron))):
            _chosen[module] = f"layer {layer.layer_number}, {name}"
            if low_precision(layer.config) is not None:
                keep_inputs(getattr(module, "linear_fc2", None))

    return choose


def _mlps(layer: Any, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the layer's MLPs and grouped experts, except MLPs that Megatron recomputes entirely."""
    mlp = layer.mlp
    if layer.recompute_mlp or getattr(mlp, "moe_layer_recompute", False):
        return
    shared = getattr(mlp, "shared_experts", None)
    for name, module in mlp.named_modules():
        if not isinstance(module, kinds):
            continue
        # Shared experts are recomputed by Megatron, or run in parts that overlap with the dispatch.
        if module is shared and (releases.recomputes_shared_experts(mlp) or mlp.shared_expert_overlap):
            continue
        yield (f"mlp.{name}" if name else "mlp"), module


choose_in_block, choose_in_mtp = chosen_layers.decorators(_choose_with, check_activation)
