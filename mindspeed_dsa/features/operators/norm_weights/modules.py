"""Keeps norm weights in fp32 while the rest of the model is converted to 16 bits.

A norm takes 16-bit input, computes in fp32 and returns 16 bits. This library's norms do so themselves. Other
norms, from Apex or Transformer Engine, get an fp32 copy of their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.operators.norm_weights.feature import FLAG, check_norm_weights
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.megatron.local_modules import (
    SequenceParallelLayerNorm,
    SequenceParallelRMSNorm,
    torch_norm,
)
from mindspeed_dsa.patches.errors import SettingsError

_OURS = (SequenceParallelRMSNorm, SequenceParallelLayerNorm)
_IN_LINEAR_LAYERS = ("layer_norm_weight", "layer_norm_bias")


def keep_norms_in_fp32(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``Float16Module.__init__``: restore the fp32 values of norm weights after the conversion."""

    def __init__(self: Any, config: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        require(context, check_norm_weights, config)
        kept = [(norm, name, getattr(norm, name).data.float()) for norm, name in parameters_of_norms(module)]
        original(self, config, module, *args, **kwargs)
        for norm, name, values in kept:
            getattr(norm, name).data = values
            if name not in _IN_LINEAR_LAYERS and not isinstance(norm, _OURS):
                norm.__class__ = _for_wider_weights(norm.__class__)

    return __init__


def parameters_of_norms(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield (norm, parameter name) for all norms of a model.

    Norms are recognized by their class name, because their packages may not be installed. Norms fused into
    linear layers are recognized by their parameter names.

    Raises:
        SettingsError: a linear layer with a fused norm is from another library, such as Transformer Engine.
    """
    for module in model.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if any(each.__name__.endswith("Norm") for each in type(module).__mro__):
            yield from ((module, name) for name in names)
            continue
        held = [name for name in names if name in _IN_LINEAR_LAYERS]
        if held and not type(module).__dict__.get("is_norm_and_product"):
            raise SettingsError(
                f"{FLAG}: {type(module).__name__} holds a norm and is not known to take its weight in fp32; "
                "use --transformer-impl local, and a specification without Transformer Engine's modules"
            )
        yield from ((module, name) for name in held)


@cache
def _for_wider_weights(norm: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a norm's class that computes in the weight's dtype."""
    base: Any = norm

    class ForWiderWeights(base):
        """Norm that casts its input to the weight's dtype, and its output back to the input's."""

        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """Normalize ``[..., hidden_size]`` to the same shape and dtype."""
            wider = torch.promote_types(hidden_states.dtype, self.weight.dtype)
            normalised: Tensor = super().forward(hidden_states.to(wider), *args, **kwargs)
            return normalised.to(hidden_states.dtype)

    ForWiderWeights.__name__, ForWiderWeights.__qualname__ = norm.__name__, norm.__qualname__
    return ForWiderWeights


def build_norm_for_wider_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``WrappedTorchNorm.__new__``: build norms that accept another dtype than their weight's."""

    def __new__(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
    ) -> Any:
        norm = torch_norm(config, hidden_size, eps)
        return original(cls, config, hidden_size, eps, *args, **kwargs) if norm is None else norm

    return __new__
