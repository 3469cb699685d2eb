"""The shared expert: one graph on one tensor parallel rank, its activation function alone on several."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.compilation.regions.region import regions_of, rows_of
from mindspeed_dsa.megatron.inlinable import Linear, linear_of

EXPERT = "shared expert"


class Activation(NamedTuple):
    """Activation of an ``MLP``: everything between its products."""

    function: Callable[[Tensor], Tensor]
    gated: bool
    clamp: float | None
    offset: float

    def of(self, states: Tensor) -> Tensor:
        """Return ``[tokens, ffn]``, where gated of twice as many."""
        if not self.gated:
            return self.function(states)
        gate, linear = states.chunk(2, dim=-1)
        if self.clamp is not None:
            gate, linear = gate.clamp(max=self.clamp), linear.clamp(min=-self.clamp, max=self.clamp)
        return self.function(gate) * (linear + self.offset if self.offset else linear)


def expert(rows: Tensor, first: Linear | None, second: Linear | None, activation: Activation) -> Tensor:
    """Map ``[tokens, hidden]`` to the same; without products, ``[tokens, ffn]`` of what lies between them."""
    between = activation.of(rows if first is None else first.of(rows))
    return between if second is None else second.of(between)


def compile_shared_expert(original: Callable[..., Tensor], context: Context[None]) -> Callable[..., Tensor]:
    """Decorate ``SharedExpertMLP.forward``."""
    regions = regions_of(context)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not regions.usable(hidden_states):
            return original(self, hidden_states, *args, **kwargs)
        if (reason := _why_not(self, context)) is not None:
            regions.declined(EXPERT, reason)
            return original(self, hidden_states)
        config, region = self.config, regions.of(EXPERT, expert)
        activation = Activation(
            config.activation_func,
            bool(config.gated_linear_unit),
            getattr(config, "activation_func_clamp_value", None),
            getattr(config, "glu_linear_offset", 0.0),
        )
        first, second = (
            linear_of(self.linear_fc1, context.megatron),
            linear_of(self.linear_fc2, context.megatron),
        )
        states = hidden_states if first is not None else self.linear_fc1(hidden_states)[0]
        found = region(rows_of(states), first, second, activation).unflatten(0, states.shape[:2])
        output: Tensor = found if second is not None else self.linear_fc2(found)[0]
        if self.use_shared_expert_gate:
            output = output * torch.sigmoid(F.linear(hidden_states, self.gate_weight))
        return output

    return forward


def _why_not(module: Any, context: Context[None]) -> str | None:
    config = module.config
    if config.add_bias_linear:
        return "its products have biases"
    if getattr(config, "use_te_activation_func", False):
        return "Transformer Engine has its activation function"
    if config.bias_activation_fusion and config.activation_func is F.gelu:
        return "Megatron's fused GELU is another function than the configuration's"
    if getattr(config, "activation_func_fp8_input_store", False):
        return "its activations are stored in fp8"
    if not _is_known(context.megatron("core.transformer.mlp")):
        return "another package replaced MLP.forward, which it would not call"
    return None


def _is_known(mlp: Any) -> bool:
    """Return whether ``MLP.forward`` is Megatron's, or a feature's that changes kernels or memory only."""
    return _is_own(mlp.MLP.forward.__code__.co_filename, mlp.__file__)


@cache
def _is_own(file: str, megatrons: str) -> bool:
    return file == megatrons or Path(file).is_relative_to(Path(__file__).parents[3])
