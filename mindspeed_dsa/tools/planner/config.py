"""Sizes of a model from its Hugging Face ``config.json``, or by the name of one that is known here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError

KINDS = ("deepseek_v3", "deepseek_v32")
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "num_experts": "n_routed_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_topk": "num_experts_per_tok",
}
_INDEXER = {
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
}
_NUMBERS = ("first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers")
KNOWN: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "vocab_size": 129280,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    }
}


def apply(path: Path, options: argparse.Namespace, given: set[str]) -> None:
    """Set the flags of the model's sizes that were not given on the command line, in place.

    Raises:
        SettingsError: the file cannot be read, or is of another kind of model.
    """
    found = KNOWN.get(str(path).lower())
    for name, value in flags_of(_read(path) if found is None else found, path).items():
        if name not in given:
            setattr(options, name, value)
    pattern, layers = options.moe_layer_freq, options.num_layers
    if "moe_layer_freq" not in given and len(pattern) != layers:  # dense layers come first
        dense = min(pattern.count(0), layers)
        options.moe_layer_freq = [0] * dense + [1] * (layers - dense)


def flags_of(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Megatron's arguments for a configuration of DeepSeek-V3 or V3.2."""
    kind = config.get("model_type")
    if kind not in KINDS:
        raise SettingsError(
            f"mindspeed_dsa plan: {path} is the configuration of model_type {kind!r}; --config reads "
            f"{' and '.join(KINDS)}, other models are given by Megatron's flags"
        )
    wanted = {**_SIZES, **(_INDEXER if "index_topk" in config else {})}
    missing = [name for name in wanted.values() if name not in config]
    if missing:
        raise SettingsError(f"mindspeed_dsa plan: {path} lacks {', '.join(missing)}")
    wrong = [name for name in (*wanted.values(), *_NUMBERS) if not _is_size(name, config.get(name, 0))]
    if wrong:
        found = ", ".join(f"{name} is {config[name]!r}" for name in wrong)
        raise SettingsError(f"mindspeed_dsa plan: {path}: {found}; give a positive number")
    if config.get("moe_layer_freq", 1) != 1:
        raise SettingsError(
            f"mindspeed_dsa plan: {path} has moe_layer_freq {config['moe_layer_freq']!r}, and --config reads "
            "1; give the sizes by Megatron's flags, with --moe-layer-freq"
        )
    dense = min(config.get("first_k_dense_replace") or 0, config["num_hidden_layers"])
    return {
        **{flag: config[name] for flag, name in wanted.items()},
        "moe_layer_freq": [0] * dense + [1] * (config["num_hidden_layers"] - dense),
        "moe_shared_expert_intermediate_size": (
            (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"] or None
        ),
        "mtp_num_layers": config.get("num_nextn_predict_layers") or None,
        "experimental_attention_variant": "dsa" if "index_topk" in config else None,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "moe_router_enable_expert_bias": True,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "swiglu": True,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _is_size(name: str, value: Any) -> bool:
    if value is None:  # queries without a latent, no prediction layers
        return name in ("q_lora_rank", *_NUMBERS)
    least = 0 if name in _NUMBERS else 1
    return type(value) is int and value >= least


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"mindspeed_dsa plan: --config {path} cannot be read ({error}); by name: {', '.join(KNOWN)}"
        ) from error
    if not isinstance(found, dict):
        raise SettingsError(f"mindspeed_dsa plan: --config {path} is no configuration of a model")
    return found
