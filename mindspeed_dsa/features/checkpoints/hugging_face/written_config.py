"""``config.json`` of a model that Megatron trained, as transformers 5 writes it.

The kind is told by the arguments: without DSA it is DeepSeek-V3, with it GLM if the indexer rotates pairs of
dimensions, and DeepSeek-V3.2 otherwise.

Imports neither torch nor Megatron nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face.config import INDEXER, SIZES, arguments_of
from mindspeed_dsa.features.checkpoints.hugging_face.flags import (
    MISSING,
    Rotary,
    before_0_14,
    layers_with_experts,
    prediction_layers,
    value_of,
)
from mindspeed_dsa.features.checkpoints.hugging_face.mismatch import mismatches
from mindspeed_dsa.megatron.dsa import uses_dsa
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError

_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}
_REPLACED = (
    "auto_map",
    "dtype",
    "index_share_for_mtp_iteration",
    "index_skip_topk_offset",
    "index_topk_freq",
    "index_topk_pattern",
    "indexer_types",
    "layer_types",
    "mlp_layer_types",
    "num_local_experts",
    "num_mtp_layers",
    "original_max_position_embeddings",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
    "transformers_version",
    *INDEXER.values(),
)
"""Names in another model's file that name code, or would contradict the names that are written."""
_NEEDED = (*SIZES, "norm_epsilon", "rotary_base", "rotary_scaling_factor", "moe_layer_freq")


def config_of(
    args: Any,
    release: str,
    who: str,
    *,
    vocabulary: int | None = None,
    dtype: str = "bfloat16",
    like: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the configuration of the model that a job trains.

    Args:
        args: Megatron-LM's namespace.
        release: of Megatron-core, which decides where ``args`` say nothing.
        who: speaks if it fails, such as ``mindspeed_dsa weights``.
        vocabulary: rows of the embedding without padding; None: ``--vocab-size``, or all rows.
        dtype: of the weights, as torch calls it.
        like: configuration of the model that training began with, for what Megatron does not know: numbers of
            special tokens, the longest context.

    Raises:
        SettingsError: the arguments have something that has no place in a configuration.
    """
    missing = [name for name in _NEEDED if value_of(args, name) is MISSING]
    if missing:
        raise SettingsError(
            f"{who}: the arguments of the checkpoint lack {', '.join(missing)}; use a checkpoint of "
            "DeepSeek-V3, DeepSeek-V3.2 or GLM-5"
        )
    if not value_of(args, "num_experts"):
        raise SettingsError(f"{who}: none of the kinds of models is without experts: give --num-experts")
    own = value_of(args, "vocab_size")
    if vocabulary and own not in (None, MISSING) and own > vocabulary:
        raise SettingsError(
            f"{who}: the checkpoint has a vocabulary of {own}, and the model that it is to be like has "
            f"{vocabulary}; name the model that it was trained from, or none"
        )
    found = {key: value for key, value in (like or {}).items() if key not in _REPLACED}
    kind = "deepseek_v3"
    if uses_dsa(args):
        paired = getattr(args, "dsa_indexer_rope_interleaved", False)
        kind = "glm_moe_dsa" if paired else "deepseek_v32"
    found |= {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": dtype,
        **{theirs: value_of(args, ours) for ours, theirs in SIZES.items()},
        "vocab_size": vocabulary or _rows(args),
        "num_key_value_heads": value_of(args, "num_attention_heads"),
        "num_nextn_predict_layers": prediction_layers(args) or 0,
        "tie_word_embeddings": not getattr(args, "untie_embeddings_and_output_weights", True),
        "rms_norm_eps": value_of(args, "norm_epsilon"),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_routing(args),
        **_rope(args, release, found),
    }
    layers = layers_with_experts(args)
    assert isinstance(layers, list)
    found["first_k_dense_replace"] = next((at for at, each in enumerate(layers) if each), len(layers))
    if kind == "deepseek_v3":
        found["rope_interleave"] = True
    else:
        found["mlp_layer_types"] = ["sparse" if each else "dense" for each in layers]
        found |= {theirs: value_of(args, ours) for ours, theirs in INDEXER.items()}
    if kind == "glm_moe_dsa":
        found |= _selections(args, found["num_hidden_layers"])
    where = f"{who}: the trained model as {kind}"
    problems = mismatches(arguments_of(found, where), args, release)
    if problems:
        raise SettingsError(
            f"{where} would be another, since its configuration has no place for what it is here: "
            f"{'; '.join(problems)}"
        )
    return found


def _rows(args: Any) -> int:
    own, padded = value_of(args, "vocab_size"), value_of(args, "padded_vocab_size")
    rows: int = padded if own is None else own
    return rows


def _routing(args: Any) -> dict[str, Any]:
    """Return how experts are chosen; groups that exclude none are one group."""
    width = value_of(args, "moe_ffn_hidden_size")
    width = value_of(args, "ffn_hidden_size") if width is None else width
    groups = getattr(args, "moe_router_num_groups", None) or 1
    chosen = getattr(args, "moe_router_group_topk", None) or groups
    return {
        "moe_intermediate_size": width,
        "n_shared_experts": (getattr(args, "moe_shared_expert_intermediate_size", None) or 0) // width,
        "n_group": groups,
        "topk_group": chosen,
        "norm_topk_prob": value_of(args, "moe_router_topk") > 1,
        "routed_scaling_factor": getattr(args, "moe_router_topk_scaling_factor", None) or 1.0,
    }


def _rope(args: Any, release: str, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary embeddings and the longest context."""
    rotary = Rotary.of(args, release)
    assert rotary is not None
    longest = value_of(args, "max_position_embeddings")
    given: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.base}
    if rotary.factor != 1:
        given = {
            "rope_type": "yarn",
            "rope_theta": rotary.base,
            "factor": rotary.factor,
            "original_max_position_embeddings": rotary.original,
            "beta_fast": rotary.beta_fast,
            "beta_slow": rotary.beta_slow,
            "mscale": getattr(args, "mscale", 1.0),
            "mscale_all_dim": getattr(args, "mscale_all_dim", 1.0 if before_0_14(release) else 0.0),
        }
        if before_0_14(release):  # whose argument is the length before
            longest = round(rotary.factor * (rotary.original or 0))
    longest = like.get("max_position_embeddings", longest)
    known = {} if longest in (None, MISSING) else {"max_position_embeddings": longest}
    return {"rope_parameters": given, **known}


def _selections(args: Any, layers: int) -> dict[str, Any]:
    """Return which layers select keys, as a list, and as the rule where there is one."""
    sharing = Sharing.of(args)
    types = ["full" if sharing.computes(layer) else "shared" for layer in range(1, layers + 1)]
    found: dict[str, Any] = {"indexer_types": types}
    if not sharing.pattern and sharing.frequency > 1:
        found["index_topk_freq"] = sharing.frequency
        found["index_skip_topk_offset"] = max(sharing.offset, 1)
    if sharing.mtp_shares:
        found["index_share_for_mtp_iteration"] = True
    return found
