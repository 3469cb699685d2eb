"""Sizes of models, and settings of Megatron's: no dropout, no fusion that needs a GPU, SwiGLU, RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """Return keyword arguments of a ``TransformerConfig``, or of one derived from it.

    Args:
        **sizes: what a case sets beside them; they win.
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
