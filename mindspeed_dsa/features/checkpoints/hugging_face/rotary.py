"""Rotary embeddings of a Hugging Face model as Megatron's arguments.

Imports neither torch nor Megatron nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import Architecture

NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "partial_rotary_factor",
)
"""Keys with numbers of rotary embeddings."""
LLAMA_3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Numbers of Llama 3's rotary embeddings, which Megatron's ``--use-rope-scaling`` has."""


def rotary_of(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return Megatron's arguments for rotary embeddings.

    Files of transformers < 5 have ``rope_theta`` and ``rope_scaling``, later files ``rope_parameters``. If
    both are present, ``rope_scaling`` has priority as in transformers.
    """
    rope = parameters_of(config)
    base = float(rope.get("rope_theta") or architecture.said(config, "rope_theta") or 10000.0)
    arguments: dict[str, Any] = {"rotary_base": int(base) if base.is_integer() else base}
    if not architecture.arguments["multi_latent_attention"]:
        scaled = {"use_rope_scaling": True, "rope_scaling_factor": LLAMA_3["factor"]}
        return arguments | (scaled if _rope_kind(rope) == "llama3" else {})
    if _rope_kind(rope) != "yarn":
        # Megatron-LM before 0.14 always applies YaRN; with a factor of 1 that is plain RoPE.
        return arguments | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    longest = architecture.said(config, "max_position_embeddings")
    original = (
        config.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or longest
    )
    scale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    return arguments | {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(rope.get("factor") or longest / original),
        "original_max_position_embeddings": original,
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        # transformers uses `mscale` only together with `mscale_all_dim`, and otherwise takes 1 and 0.
        "mscale": float(scale) if scale and all_dims else 1.0,
        "mscale_all_dim": float(all_dims or 0.0),
    }


def yarn_scale(factor: float, scale: float) -> float:
    """Return YaRN's attention scale ``1 + 0.1 scale log(factor)``, or 1 if ``factor <= 1``."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def parameters_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table of rotary embeddings, under whichever key a file has it."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _rope_kind(given: Mapping[str, Any]) -> Any:
    return given.get("rope_type") or given.get("type") or "default"


def problems_of(config: Mapping[str, Any], architecture: Architecture) -> Iterator[str]:
    """Yield rotary embedding properties that Megatron's attention does not support."""
    rope = parameters_of(config)
    kind = _rope_kind(rope)
    if kind not in architecture.ropes:
        yield f"rope_type is {kind!r}, and it has {' or '.join(map(repr, architecture.ropes))} only"
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        yield f"partial_rotary_factor is {part!r}, and it rotates all dimensions"
    if kind == "llama3":
        for name, value in LLAMA_3.items():
            if rope.get(name) != value:
                yield f"{name} is {rope.get(name)!r}, and its --use-rope-scaling has {value:g} only"
    if kind != "yarn" or kind not in architecture.ropes:
        return
    if rope.get("truncate") is False:
        yield "truncate is False, and it rounds YaRN's range of dimensions"
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        yield "mscale_all_dim is given without mscale"
    rotary = rotary_of(config, architecture)
    factor, scale, all_dims = (rotary[name] for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim"))
    magnitude = yarn_scale(factor, scale) / yarn_scale(factor, all_dims)
    stated = rope.get("attention_factor")
    if stated is not None and not math.isclose(stated, magnitude):
        yield f"attention_factor is {stated!r}, and it has that of mscale and mscale_all_dim, {magnitude:g}"
