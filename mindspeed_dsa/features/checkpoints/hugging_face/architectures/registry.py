"""List of the supported architectures, and lookup by ``config.json`` or by a job's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.deepseek import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_MOE_DSA,
)
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.llama import LLAMA, MIXTRAL
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.qwen import (
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
)
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import MODEL, Architecture
from mindspeed_dsa.patches.errors import SettingsError

ARCHITECTURES = (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_MOE_DSA,
    QWEN3_MOE,
    QWEN3,
    QWEN2_MOE,
    QWEN2,
    MIXTRAL,
    LLAMA,
)
BY_TYPE = {name: architecture for architecture in ARCHITECTURES for name in architecture.types}
"""Dict from ``model_type`` to the architecture."""
_TELLING = ("multi_latent_attention", "qk_layernorm", "add_qkv_bias")
"""Megatron's switches that tell architectures apart."""
_OF_OTHERS = {
    "hc_mult": "hyper-connections",
    "linear_conv_kernel_dim": "linear attention",
    "swiglu_limit": "limited activations",
}
"""Dict from keys of close architectures to the parts of their layers that no known architecture has."""
LAYER_TENSORS = frozenset(name for each in ARCHITECTURES for name in each.tensors.layer)
PREDICTION_TENSORS = frozenset(name for each in ARCHITECTURES for name in each.tensors.prediction)
MODEL_TENSORS = frozenset(MODEL)
"""Megatron's names of tensors in layers, in multi-token prediction layers, and outside of layers."""


def find(config: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture of a ``config.json``.

    Raises:
        SettingsError: the model type is not supported.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in BY_TYPE:
        of_others = next((f", with {part} ({key})" for key, part in _OF_OTHERS.items() if key in config), "")
        raise SettingsError(
            f"{where} is the configuration of model_type {kind!r}{of_others}; what can be read is "
            f"{', '.join(BY_TYPE)}; name a model of one of these"
        )
    return BY_TYPE[kind]


def of_class(config: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture of the class that ``architectures`` names, for an unknown ``model_type``."""
    classes = config.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    return next((each for each in ARCHITECTURES if each.class_name == first), None)


def of_job(args: Any) -> Architecture:
    """Return the architecture that a job trains: the one that agrees with most of the job's arguments."""
    known: Iterable[Architecture] = ARCHITECTURES
    if not hasattr(args, "multi_latent_attention") and getattr(args, "kv_lora_rank", None):
        # A loop other than Megatron-LM's may set latent attention in its model's configuration only.
        known = (each for each in ARCHITECTURES if each.arguments["multi_latent_attention"])

    def matching(architecture: Architecture) -> float:
        marks = {name: bool(architecture.arguments.get(name)) for name in _TELLING}
        marks |= {"num_experts": "num_experts" in architecture.sizes, **architecture.marks}
        return sum(bool(getattr(args, name, None)) == mark for name, mark in marks.items()) / len(marks)

    return max(known, key=matching)
