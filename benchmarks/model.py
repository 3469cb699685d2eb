"""Model sizes and Megatron settings: no dropout, no fusion that needs a GPU, SwiGLU, RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model and of a microbatch."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    sequences: int


def deterministic_layers(**sizes: Any) -> dict[str, Any]:
    """Return keyword arguments of a ``TransformerConfig`` or of a class derived from it.

    Args:
        **sizes: a case's additional arguments; they override the others.
    """
    return {
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        **sizes,
    }


def latent_layers(**sizes: Any) -> dict[str, Any]:
    """Return keyword arguments of an ``MLATransformerConfig``; see :func:`deterministic_layers`."""
    return deterministic_layers(
        **{"multi_latent_attention": True, "rope_type": "rope", "qk_layernorm": True, **sizes}
    )


def global_names(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return a chunk's parameters by their names in a model on one rank."""
    offset = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    named = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + offset)
        named[".".join(parts)] = parameter
    return named
