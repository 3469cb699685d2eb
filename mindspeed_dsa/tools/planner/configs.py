"""Sizes of a model from its Hugging Face ``config.json``, or by its name."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError

KINDS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
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
_RULE, _PATTERN = {"dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"}, "dsa_indexer_topk_pattern"
_NUMBERS = ("first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers")
_BOTH = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_GLM = {
    **_BOTH,
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "vocab_size": 154880,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
}
_GLM_SHARED = {**_GLM, "index_topk_freq": 4, "index_skip_topk_offset": 3}
KNOWN: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": {
        **_BOTH,
        "model_type": "deepseek_v32",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "vocab_size": 129280,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_n_heads": 64,
    },
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.2": _GLM_SHARED,
    "glm-5.3": _GLM_SHARED,
}
"""Configurations by the name that ``--config`` takes."""


def apply(path: Path, options: argparse.Namespace, given: set[str]) -> None:
    """Set the flags of the model's sizes that were not given on the command line, in place.

    Raises:
        SettingsError: the file cannot be read, or is of another kind of model.
    """
    found = KNOWN.get(str(path).lower())
    said = flags_of(_read(path) if found is None else found, path)
    # A pattern takes the place of frequency and offset, and they that of the file's pattern.
    overruled = _RULE if _PATTERN in given else {_PATTERN} if given & _RULE else set()
    for name, value in said.items():
        if name not in given | overruled:
            setattr(options, name, value)
    layers = options.num_layers
    if "moe_layer_freq" not in given and len(options.moe_layer_freq) != layers:  # dense layers come first
        dense = min(options.moe_layer_freq.count(0), layers)
        options.moe_layer_freq = [0] * dense + [1] * (layers - dense)
    if options.dsa_indexer_topk_pattern and _PATTERN not in given:
        options.dsa_indexer_topk_pattern = options.dsa_indexer_topk_pattern[:layers]


def flags_of(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return Megatron's arguments for a configuration of DeepSeek-V3, V3.2 or GLM-5.x.

    Raises:
        SettingsError: it is of another kind of model, or its sizes are none.
    """
    kind = config.get("model_type")
    if kind not in KINDS:
        raise SettingsError(
            f"mindspeed_dsa plan: {path} is the configuration of model_type {kind!r}; --config reads "
            f"{', '.join(KINDS)}; other models are given by Megatron's flags"
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
    return {
        **{flag: config[name] for flag, name in wanted.items()},
        **_sharing(config, path),
        "moe_layer_freq": _experts(config, path),
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


def _experts(config: dict[str, Any], path: Path) -> list[int]:
    """Return 1 for each layer whose MLP has experts: a list of types, or dense layers first."""
    layers, types = config["num_hidden_layers"], config.get("mlp_layer_types")
    if types is None:
        dense = min(config.get("first_k_dense_replace") or 0, layers)
        return [0] * dense + [1] * (layers - dense)
    return [int(each == "sparse") for each in _types(config, path, "mlp_layer_types", ("dense", "sparse"))]


def _sharing(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return which layers select keys, as Megatron's flags; Hugging Face counts from 0, and by types.

    A list of types counts; where frequency and offset say the same, they are what is returned.
    """
    rule = Sharing(config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2))
    if rule.frequency > 1 and rule.offset < 1:
        raise SettingsError(
            f"mindspeed_dsa plan: {path}: with index_skip_topk_offset {rule.offset} layer 0 shares a "
            "selection, and no layer below it selects; give 1 or more"
        )
    pattern = config.get("index_topk_pattern")
    if config.get("indexer_types") is not None:
        types = _types(config, path, "indexer_types", ("full", "shared"))
        pattern = "".join("S" if each == "shared" else "F" for each in types)
    if isinstance(pattern, list):
        pattern = "".join("S" if each == "shared" else "F" for each in pattern)
    by_rule = [rule.computes(layer) for layer in range(1, config["num_hidden_layers"] + 1)]
    if pattern and [letter != "S" for letter in pattern] != by_rule:
        return {_PATTERN: pattern}
    if rule.frequency == 1:
        return {}
    return {"dsa_indexer_topk_freq": rule.frequency, "dsa_indexer_skip_topk_offset": rule.offset}


def _types(config: dict[str, Any], path: Path, name: str, allowed: tuple[str, ...]) -> list[str]:
    """Return a list with a word for each layer."""
    types, layers = config[name], config["num_hidden_layers"]
    if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= set(allowed):
        raise SettingsError(
            f"mindspeed_dsa plan: {path}: {name} is no list of {' or '.join(allowed)} for each of "
            f"{layers} layers"
        )
    return types


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
