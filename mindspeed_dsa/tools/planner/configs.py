"""Reader of model sizes: from a Hugging Face ``config.json``, or by the name of a known model."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face import config
from mindspeed_dsa.features.checkpoints.hugging_face import flags as hugging_face
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import BY_TYPE, of_class
from mindspeed_dsa.features.checkpoints.hugging_face.rotary import LLAMA_3
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner.job import Job

_WHO = "mindspeed_dsa plan"
_RULE, _PATTERN = {"dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"}, "dsa_indexer_topk_pattern"
# Sizes that DeepSeek-V3.2 and GLM-5 have in common.
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
_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
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
    "rope_theta": 1000000,
}
_GLM_SHARED = {**_GLM, "rope_theta": 8000000, "index_topk_freq": 4, "index_skip_topk_offset": 3}
_DEEPSEEK_V32 = {
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
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": _YARN,
}
_DEEPSEEK_V3 = {
    **{name: value for name, value in _DEEPSEEK_V32.items() if not name.startswith("index_")},
    "model_type": "deepseek_v3",
}
# Models of Moonshot AI route over all experts in one group.
_ONE_GROUP = {"n_group": 1, "topk_group": 1, "vocab_size": 163840, "num_nextn_predict_layers": 0}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
}
KNOWN: dict[str, dict[str, Any]] = {
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3.1": _DEEPSEEK_V3,
    "deepseek-v3.2": _DEEPSEEK_V32,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.2": _GLM_SHARED,
    "glm-5.3": _GLM_SHARED,
    "kimi-k2": {
        **_DEEPSEEK_V3,
        **_ONE_GROUP,
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "max_position_embeddings": 131072,
        "rope_theta": 50000,
        "rope_scaling": {**_YARN, "factor": 32, "beta_fast": 1},
    },
    "moonlight": {
        **_DEEPSEEK_V3,
        **_ONE_GROUP,
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000,
        "rope_scaling": None,
    },
    "qwen3-235b-a22b": {
        **_QWEN3_MOE,
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
        "rope_scaling": {"rope_type": "llama3", **LLAMA_3},
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000,
    },
}
"""Dict from a name that ``--config`` accepts to the model's configuration."""


def read(path: Path) -> dict[str, Any]:
    """Return the configuration for a name or file, with ``model_type`` set to a supported architecture.

    Raises:
        SettingsError: the file cannot be read.
    """
    configuration = KNOWN.get(str(path).lower())
    if configuration is not None:
        return configuration
    try:
        configuration, _ = config.read_model(path, _WHO)
    except SettingsError as error:
        raise SettingsError(f"{error}; --config knows by name {', '.join(KNOWN)}") from error
    # A model type of its own may name a class that is known.
    if configuration.get("model_type") not in BY_TYPE and (architecture := of_class(configuration)):
        configuration = {**configuration, "model_type": architecture.types[0]}
    return configuration


def flags_of(path: Path, given: set[str], job: Job, release: str) -> list[str]:
    """Return Megatron's flags for the model's sizes, except those that the job sets itself.

    Args:
        path: name or file, as for ``--config``.
        given: names of the arguments that the job's own flags set.
        job: planned job.
        release: Megatron-core release.

    Raises:
        SettingsError: Megatron does not support the model.
    """
    # The padded vocabulary depends on the tensor parallel size, so Megatron computes it.
    names = {"add_bias_linear": "disable-bias-linear"}
    omitted = {"padded-vocab-size"} | {names.get(name, name.replace("_", "-")) for name in given}
    lines = []
    for line in hugging_face.flags_of(read(path), release, f"{_WHO}: {path}"):
        name = line.split()[0].removeprefix("--").removeprefix("no-")
        if name == "moe-layer-freq":
            layers = hugging_face.pattern([int(each) for each in job.model.pattern])
            line = shlex.join(["--moe-layer-freq", layers])
        lines += [line] if name not in omitted else []
    return lines


def apply(path: Path, options: argparse.Namespace, flags_given: set[str]) -> None:
    """Set the model's sizes in ``options``, except those given on the command line.

    Raises:
        SettingsError: the file cannot be read, or is for another kind of model.
    """
    described, where = read(path), f"{_WHO}: {path}"
    try:
        said = config.sizes_of(described, where)
    except SettingsError as error:
        raise SettingsError(f"{error}; or omit --config, and give the sizes by Megatron's flags") from error
    # A pattern given as a flag overrides the file's frequency and offset, and the other way round.
    overruled = _RULE if _PATTERN in flags_given else {_PATTERN} if flags_given & _RULE else set()
    for name, value in said.items():
        if name not in flags_given | overruled:
            setattr(options, name, value)
    layers = options.num_layers
    if "moe_layer_freq" in said.keys() - flags_given and layers != said["num_layers"]:
        options.moe_layer_freq = config.expert_layers(described, where, layers)
    if options.dsa_indexer_topk_pattern and _PATTERN not in flags_given:
        options.dsa_indexer_topk_pattern = options.dsa_indexer_topk_pattern[:layers]
