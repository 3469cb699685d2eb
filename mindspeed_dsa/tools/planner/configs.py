"""Sizes of a model from its Hugging Face ``config.json``, or by its name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face import config
from mindspeed_dsa.patches.errors import SettingsError

_WHO = "mindspeed_dsa plan"
_RULE, _PATTERN = {"dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"}, "dsa_indexer_topk_pattern"
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
    if found is None:
        try:
            found, _ = config.read_model(path, _WHO)
        except SettingsError as error:
            raise SettingsError(f"{error}; --config knows by name {', '.join(KNOWN)}") from error
    said = config.sizes_of(found, f"{_WHO}: {path}")
    said["disable_bias_linear"] = not said.pop("add_bias_linear")  # one flag, of which Megatron stores this
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
