"""``config.json`` of a model trained with Megatron, as transformers 5 writes it.

The arguments determine the architecture, see
:func:`~mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry.of_job`.

Imports neither torch nor Megatron nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import BY_TYPE, of_job
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import PREDICTIONS, Architecture
from mindspeed_dsa.features.checkpoints.hugging_face.config import INDEXER, arguments_of
from mindspeed_dsa.features.checkpoints.hugging_face.contract import lacking
from mindspeed_dsa.features.checkpoints.hugging_face.flags import (
    MISSING,
    Rotary,
    before_0_14,
    head_width,
    layers_with_experts,
    prediction_layers,
    query_groups,
    value_of,
)
from mindspeed_dsa.features.checkpoints.hugging_face.mismatch import mismatches
from mindspeed_dsa.features.checkpoints.hugging_face.rotary import LLAMA_3
from mindspeed_dsa.megatron.dsa import uses_dsa
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError

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
    "use_index_cache",
    *INDEXER.values(),
)
"""Keys of a reference configuration that are dropped: they refer to code, or conflict with written keys."""
_EQUIVALENT = ("architectures", "decoder_sparse_step", "head_dim", "mlp_only_layers", "rope_parameters")
"""Keys that may be written in another form."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys with the ids of special tokens."""


def config_of(
    args: Any,
    release: str,
    who: str,
    *,
    vocabulary: int | None = None,
    dtype: str = "bfloat16",
    like: Mapping[str, Any] | None = None,
    tokens: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the configuration of the model that a job trains.

    Args:
        args: Megatron-LM's namespace.
        release: release of Megatron-core, for the defaults of unset arguments.
        who: prefix of error messages, such as ``mindspeed_dsa weights``.
        vocabulary: embedding rows without padding; default: ``--vocab-size``, or all rows.
        dtype: torch's name of the weights' dtype.
        like: configuration of the model that training started from, for values unknown to Megatron: special
            token ids, longest context.
        tokens: ids of special tokens, for those that ``like`` does not have.

    Raises:
        SettingsError: the configuration has no key for a property of the model.
    """
    architecture = of_job(args)
    has_experts = "num_experts" in architecture.sizes
    needed = [*architecture.sizes, "norm_epsilon", "rotary_base"]
    needed += ["moe_layer_freq"] if has_experts else []
    needed += ["rotary_scaling_factor"] if architecture.arguments["multi_latent_attention"] else []
    given = {"vocab_size"} if vocabulary else set()
    missing = [name for name in needed if name not in given and _size(args, name) is MISSING]
    if missing:
        raise SettingsError(
            f"{who}: the trained model's arguments lack {', '.join(missing)}; use a model of "
            f"{', '.join(BY_TYPE)}"
        )
    if has_experts and not value_of(args, "num_experts"):
        raise SettingsError(f"{who}: a model with latent attention has experts: give --num-experts")
    unpadded = value_of(args, "vocab_size")
    if vocabulary and unpadded not in (None, MISSING) and unpadded > vocabulary:
        raise SettingsError(
            f"{who}: the checkpoint has a vocabulary of {unpadded}, and the model that it is to be like has "
            f"{vocabulary}; name the model that it was trained from, or none (weights export without --like)"
        )
    # Null where nothing says an id: transformers would take tokens 0 and 1, and engines end at token 1.
    described: dict[str, Any] = {**dict.fromkeys(TOKENS), **tokens}
    described |= {key: value for key, value in (like or {}).items() if key not in _REPLACED}
    described |= {
        "architectures": [architecture.class_name],
        "model_type": architecture.types[0],
        "dtype": dtype,
        "torch_dtype": dtype,
        # Without a number of their own, as many heads have keys as queries.
        "num_key_value_heads": value_of(args, "num_attention_heads"),
        **{theirs: _size(args, ours) for ours, theirs in architecture.sizes.items()},
        **{key: allowed[0] for key, allowed in architecture.only.items()},
        "vocab_size": vocabulary or _rows(args),
        "tie_word_embeddings": not getattr(args, "untie_embeddings_and_output_weights", True),
        "rms_norm_eps": value_of(args, "norm_epsilon"),
        "attention_dropout": 0.0,
        **_rope(args, release, described, architecture),
    }
    for key, parts in architecture.sums.items():
        described[key] = sum(described[part] for part in parts)
    if PREDICTIONS in architecture.counts:
        described[PREDICTIONS] = prediction_layers(args) or 0
    layers = layers_with_experts(args) if has_experts else []
    assert isinstance(layers, list)
    if has_experts:
        described |= _routing(args, architecture)
    if "first_k_dense_replace" in architecture.counts:
        described["first_k_dense_replace"] = [*layers, 1].index(1)
    if "decoder_sparse_step" in architecture.counts:
        described["decoder_sparse_step"] = 1
        described["mlp_only_layers"] = [layer for layer, sparse in enumerate(layers) if not sparse]
    if "mlp_layer_types" in architecture.lists:
        described["mlp_layer_types"] = ["sparse" if sparse else "dense" for sparse in layers]
    if uses_dsa(args):
        described |= {theirs: value_of(args, ours) for ours, theirs in INDEXER.items()}
        described |= _selections(args, architecture, like or {})
    # Check by converting back: a property without a key shows up as a mismatch.
    where = f"{who}: the trained model as {architecture.types[0]}"
    problems = [*mismatches(arguments_of(described, where), args, release), *lacking(described)]
    if problems:
        raise SettingsError(
            f"{where} would be another, since its configuration has no place for what it is here: "
            f"{'; '.join(problems)}"
        )
    return described


def _size(args: Any, name: str) -> Any:
    if name == "num_query_groups":
        return query_groups(args)
    return head_width(args) if name == "kv_channels" else value_of(args, name)


def _rows(args: Any) -> int:
    unpadded, padded = value_of(args, "vocab_size"), value_of(args, "padded_vocab_size")
    rows: int = padded if unpadded is None else unpadded
    return rows


def _routing(args: Any, architecture: Architecture) -> dict[str, Any]:
    """Return the routing keys; group-limited routing that excludes no group becomes one group."""
    width = value_of(args, "moe_ffn_hidden_size")
    width = value_of(args, "ffn_hidden_size") if width is None else width
    if architecture.arguments["moe_router_score_function"] == "softmax":
        sums = not getattr(args, "moe_router_pre_softmax", False)
        normalised = {"norm_topk_prob": sums} if "norm_topk_prob" in architecture.defaults else {}
        return {architecture.sizes["moe_ffn_hidden_size"]: width, **normalised}
    # Without groups, `topk_group` equals `n_group`: no group is excluded.
    groups = getattr(args, "moe_router_num_groups", None) or 1
    group_topk = getattr(args, "moe_router_group_topk", None) or groups
    return {
        "moe_intermediate_size": width,
        "n_shared_experts": (getattr(args, "moe_shared_expert_intermediate_size", None) or 0) // width,
        "n_group": groups,
        "topk_group": group_topk,
        "norm_topk_prob": value_of(args, "moe_router_topk") > 1,
        "routed_scaling_factor": getattr(args, "moe_router_topk_scaling_factor", None) or 1.0,
    }


def _rope(args: Any, release: str, like: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the rotary embedding keys and the longest context."""
    rotary = Rotary.of(args, release) if architecture.arguments["multi_latent_attention"] else None
    longest = value_of(args, "max_position_embeddings")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(value_of(args, "rotary_base"))}
    if getattr(args, "use_rope_scaling", False):
        rope |= {**LLAMA_3, "rope_type": "llama3"}
    elif rotary is not None and rotary.factor != 1:
        rope = {
            "rope_type": "yarn",
            "rope_theta": rotary.base,
            "factor": rotary.factor,
            "original_max_position_embeddings": rotary.original,
            "beta_fast": rotary.beta_fast,
            "beta_slow": rotary.beta_slow,
            "mscale": getattr(args, "mscale", 1.0),
            "mscale_all_dim": getattr(args, "mscale_all_dim", 1.0 if before_0_14(release) else 0.0),
        }
        if before_0_14(release):  # the argument is the length before the extension
            longest = round(rotary.factor * (rotary.original or 0))
    # The reference model's length has priority.
    longest = like.get("max_position_embeddings", longest)
    length = {} if longest in (None, MISSING) else {"max_position_embeddings": longest}
    # Programs of transformers 4 read these two keys, and transformers 5 before the first one.
    scaling = {"type": rope["rope_type"], **{key: rope[key] for key in rope if key != "rope_theta"}}
    older = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }
    return {"rope_parameters": rope, **older, **length}


def _selections(args: Any, architecture: Architecture, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the indexers' rotation, and the layers that select keys in all forms that readers know."""
    sharing, layers = Sharing.of(args), value_of(args, "num_layers")
    letters = "".join("F" if sharing.computes(layer) else "S" for layer in range(1, layers + 1))
    selections: dict[str, Any] = {
        "indexer_rope_interleave": bool(getattr(args, "dsa_indexer_rope_interleaved", False))
    }
    if "indexer_types" in architecture.lists:
        selections["indexer_types"] = ["shared" if letter == "S" else "full" for letter in letters]
    if "S" in letters:
        # Engines disagree on offsets, and read a pattern first; vLLM's DeepSeek-V3.2 needs the switch.
        selections |= {"use_index_cache": True, "index_topk_pattern": letters}
    if not sharing.pattern and sharing.frequency > 1:
        selections["index_topk_freq"] = sharing.frequency
        selections["index_skip_topk_offset"] = max(sharing.offset, 1)
    # Megatron has no iteration over a single layer of multi-token prediction, and no argument for it.
    iterated = "index_share_for_mtp_iteration"
    if sharing.mtp_shares:
        selections[iterated] = True
    elif iterated in like and (prediction_layers(args) or 0) <= 1:
        selections[iterated] = like[iterated]
    return selections


def notes(
    described: Mapping[str, Any],
    like: Mapping[str, Any] | None,
    args: Any,
    tokens: Mapping[str, int | list[int] | None] | None = None,
) -> list[str]:
    """Return sentences on a written configuration: unknown tokens, keys that contradict the reference.

    Args:
        described: written configuration.
        like: configuration of the model that training started from.
        args: Megatron-LM's namespace.
        tokens: ids of special tokens of the job's tokenizer.
    """
    if like is None:
        if any(described[key] is not None for key in TOKENS):
            return []
        return [f"config.json has no {', '.join(TOKENS)}: no tokenizer is known; name the model with --like"]
    said = [
        f"config.json has {key} {described[key]!r}, and the model that it is like {value!r}"
        for key, value in like.items()
        if key in described and key not in (*_REPLACED, *_EQUIVALENT) and described[key] != value
    ]
    others = [
        f"{key} {value}" for key, value in (tokens or {}).items() if not _include(described[key], value)
    ]
    if others:
        said.append(
            f"the job's tokenizer has {', '.join(others)}, and the files and ids of the tokenizer that are "
            f"written are those of the model that this one is like: take them from {args.tokenizer_model}"
        )
    if described.get("tie_word_embeddings") and (rows := _rows_left_out(described["vocab_size"], args)):
        said.append(
            f"{rows} rows of the embedding are taken for padding and not written: if the tokenizer has "
            "tokens there, export the checkpoint without the model that it is like"
        )
    kinds = described.get("mlp_layer_types")
    if kinds and kinds != sorted(kinds) and "first_k_dense_replace" in described:
        said.append(
            "dense layers follow layers with experts, which mlp_layer_types says: a reader of "
            "first_k_dense_replace alone builds another model"
        )
    longest, kept = value_of(args, "max_position_embeddings"), described.get("max_position_embeddings")
    if isinstance(longest, int) and kept is not None and longest > kept:
        said.append(f"config.json keeps max_position_embeddings {kept}, and the job has {longest}")
    return said


def _rows_left_out(vocabulary: int, args: Any) -> int:
    """Return the number of embedding rows beyond those to which Megatron pads a vocabulary by itself."""
    padded, multiple = value_of(args, "padded_vocab_size"), value_of(args, "make_vocab_size_divisible_by")
    ranks = value_of(args, "tensor_model_parallel_size")
    if not all(isinstance(value, int) for value in (padded, multiple, ranks)):
        return 0
    step = multiple * ranks
    return padded - vocabulary if padded > -(-vocabulary // step) * step else 0


def _include(described: int | list[int] | None, value: int | list[int] | None) -> bool:
    """Return whether described ids, one or a list, include an id or all ids of a list."""
    ids = described if isinstance(described, list) else [described]
    return all(each in ids for each in (value if isinstance(value, list) else [value]))
