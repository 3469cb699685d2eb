"""Small Hugging Face configs of all supported kinds, as transformers writes them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face.config import arguments_of

KINDS = {
    "deepseek_v3": "DeepseekV3Config",
    "deepseek_v32": "DeepseekV32Config",
    "glm_moe_dsa": "GlmMoeDsaConfig",
}
GROUPED = {
    "qwen2": "Qwen2Config",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "llama": "LlamaConfig",
    "mixtral": "MixtralConfig",
}
"""Classes of architectures without latent attention."""
"""Dict from ``model_type`` to the config class of transformers."""
WHERE = "mindspeed_dsa weights: DIR/config.json"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""Rotary embedding of DeepSeek models."""
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3.1's rotary embeddings."""
_SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 1,
}
_GROUPED: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 8},
}
_INDEXER = {"index_topk": 16, "index_n_heads": 3, "index_head_dim": 32}


def config(kind: str, **changed: Any) -> dict[str, Any]:
    """Return the config that transformers writes for a small model.

    Args:
        kind: a key of :data:`KINDS`.
        changed: fields that replace sizes or the class's defaults.
    """
    import transformers

    sizes = _SIZES | ({} if kind == "deepseek_v3" else _INDEXER)
    if kind in GROUPED:
        sizes = _GROUPED | _EXPERTS.get(kind, {}) | ({"num_experts_per_tok": 4} if kind in _EXPERTS else {})
    made = getattr(transformers, {**KINDS, **GROUPED}[kind])(**{**sizes, **changed})
    return dict(json.loads(made.to_json_string()))


def job(arguments: dict[str, Any], release: str, **changed: Any) -> SimpleNamespace:
    """Return parsed arguments of a Megatron release, with a padded vocabulary."""
    values = {**arguments, "padded_vocab_size": 1024}
    for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
        if name in values:
            values[f"yarn_{name}"] = values.pop(name)
    if release == "0.12.1":
        values.pop("rope_type", None)
        length = values.pop("yarn_original_max_position_embeddings", None)
        values["max_position_embeddings"] = length or values["max_position_embeddings"]
    else:
        values["layernorm_epsilon"] = values.pop("norm_epsilon")
    return SimpleNamespace(**{**values, **changed})


def arguments(kind: str, **changed: Any) -> dict[str, Any]:
    """Return Megatron arguments for :func:`config`."""
    return arguments_of(config(kind, **changed), WHERE)
