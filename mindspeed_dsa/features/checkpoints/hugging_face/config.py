"""Conversion of a Hugging Face ``config.json`` to Megatron's arguments.

Architectures are tables in the folder ``architectures``. Arguments have the names of Megatron-LM 0.19 and of
this library's flags. Names in other releases are in
:mod:`~mindspeed_dsa.features.checkpoints.hugging_face.flags`. A number that a file leaves out has the default
of transformers' class.

Imports neither torch nor Megatron nor transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import BY_TYPE, find
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import (
    ABSENT,
    ATTENTION_TYPES,
    COMMON,
    LAYERS,
    PREDICTIONS,
    Architecture,
)
from mindspeed_dsa.features.checkpoints.hugging_face.rotary import (
    NUMBERS,
    parameters_of,
    problems_of,
    rotary_of,
)
from mindspeed_dsa.megatron.dsa import MODELS
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError

FILE = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
INDEXER = {
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
}
_LETTERS = {"F": "F", "C": "F", "FULL": "F", "S": "S", "SHARED": "S"}
"""Words in patterns of layers that select keys or share them; MindSpeed-LLM writes C."""
MOST_LAYERS = 10_000
"""Maximum number of layers in a credible file: several lists have one entry per layer."""
_LARGEST = 2**31 - 1
_LENGTH = 8
"""Size in bytes of the header length at the start of a safetensors file."""
_LARGEST_HEADER = 100_000_000
"""Maximum header size of the safetensors library, in bytes."""
_NAME_A_FOLDER = "name a model's folder, with config.json and safetensors files"


def read_config(path: Path, who: str) -> dict[str, Any]:
    """Read a model's ``config.json``.

    Args:
        path: path of the file or its folder.
        who: prefix of error messages, such as ``mindspeed_dsa weights``.

    Raises:
        SettingsError: the file cannot be read or is not a configuration.
    """
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{who}: {file} cannot be read ({error}); {_NAME_A_FOLDER}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{who}: {file} is no configuration of a model; {_NAME_A_FOLDER}")
    return _without_wrapper(content)


def _without_wrapper(content: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the keys in ``text_config``, which some tools write, at the top level."""
    inner = content.get("text_config")
    if not isinstance(inner, dict) or "vision_config" in content:  # with images it is another model
        return content
    # The quantization is outside of it, and a model type such as deepseek_v32 inside, outside, or both.
    flat = {**content, **inner}
    flat["model_type"] = next(
        (each.get("model_type") for each in (inner, content) if str(each.get("model_type")) in BY_TYPE), None
    ) or content.get("model_type")
    del flat["text_config"]
    return flat


def read_model(path: Path, who: str) -> tuple[dict[str, Any], int]:
    """Read a model's ``config.json``, without multi-token prediction layers that the weights lack.

    transformers does not save these layers, but keeps their number in the configuration.

    Args:
        path: path of the file or its folder; the folder may have no weights.
        who: prefix of error messages.

    Returns:
        Configuration, and number of multi-token prediction layers that the weights lack.

    Raises:
        SettingsError: the file cannot be read or is not a configuration.
    """
    content = read_config(path, who)
    layers, told = content.get(LAYERS), content.get(PREDICTIONS)
    names = _names_in(path if path.is_dir() else path.parent)
    if not names or not isinstance(layers, int) or not isinstance(told, int):
        return content, 0
    # "model.layers.61.eh_proj.weight" -> "61". Prediction layers are numbered after the decoder's layers.
    numbers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    # Index of the first prediction layer without weights.
    there = next((layer for layer in range(told) if str(layers + layer) not in numbers), told)
    return {**content, "num_nextn_predict_layers": there}, told - there


def _names_in(folder: Path) -> Iterable[str]:
    """Return the names of a folder's weights; empty without weights or with damaged files."""
    try:
        if (folder / INDEX).is_file():
            content = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        else:
            with open(folder / SINGLE, "rb") as file:
                length = int.from_bytes(file.read(_LENGTH), "little")
                content = json.loads(file.read(min(length, _LARGEST_HEADER)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()
    return content if isinstance(content, dict) else ()


# -- sizes -------------------------------------------------------------------------------------


def sizes_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments that set sizes of weights and activations, and the amount of work.

    Args:
        config: content of ``config.json``, see :func:`read_config`.
        where: source of the configuration as prefix of messages: ``mindspeed_dsa plan: DIR/config.json``.

    Returns:
        Dict from Megatron's argument to its value; ``None`` for parts that the model lacks.

    Raises:
        SettingsError: the model type is not supported, or sizes are invalid.
    """
    architecture = find(config, where)
    sparse = architecture.marks.get("experimental_attention_variant") or (
        architecture.indexer and "index_topk" in config
    )
    wanted = {**architecture.sizes, **(INDEXER if sparse else {})}
    missing = [name for name in wanted.values() if not architecture.has(config, name)]
    if missing:
        raise SettingsError(f"{where} lacks {', '.join(missing)}")
    said = {name: architecture.said(config, name) for name in (*wanted.values(), *architecture.counts)}
    wrong = [name for name, value in said.items() if not _is_size(name, value, architecture)]
    if wrong:
        found = ", ".join(f"{name} is {said[name]!r}" for name in wrong)
        raise SettingsError(
            f"{where}: {found}; give a positive number, of layers not more than {MOST_LAYERS:,}"
        )
    if config.get("moe_layer_freq", 1) != 1:
        raise SettingsError(
            f"{where} has moe_layer_freq {config['moe_layer_freq']!r}, and only 1 can be read; name a "
            "model with experts in all layers above its first dense ones"
        )
    sizes = {
        **{flag: said[name] for flag, name in wanted.items()},
        **_sharing(config, where),
        "mtp_num_layers": said.get(PREDICTIONS) or None,
        "experimental_attention_variant": "dsa" if sparse else None,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        **COMMON,
        **architecture.arguments,
    }
    if "kv_channels" in sizes:
        heads = sizes["num_attention_heads"]
        sizes["num_query_groups"] = sizes["num_query_groups"] or heads
        sizes["kv_channels"] = sizes["kv_channels"] or max(sizes["hidden_size"] // heads, 1)
    if sizes["num_experts"]:
        sizes["moe_layer_freq"] = expert_layers(config, where, config[LAYERS])
        # Megatron computes n shared experts as one MLP of n times the width.
        shared = (said.get("n_shared_experts") or 0) * sizes["moe_ffn_hidden_size"] or None
        sizes.setdefault("moe_shared_expert_intermediate_size", shared)
    return sizes


def expert_layers(config: Mapping[str, Any], where: str, layers: int) -> list[int]:
    """Return 1 for each layer with experts and 0 for dense layers, in a model of this many layers.

    Args:
        config: content of ``config.json``, see :func:`read_config`.
        where: source of the configuration as prefix of messages: ``mindspeed_dsa plan: DIR/config.json``.
        layers: number of layers, which may differ from the configuration's.

    Raises:
        SettingsError: the keys are invalid, or list fewer layers in another order than dense ones first.
    """
    architecture, name = find(config, where), "mlp_layer_types"
    dense, step = 0, 1
    dense_layers: list[int] = []
    if name in architecture.lists and config.get(name) is not None:
        listed = [int(each == "sparse") for each in _types(config, where, name, ("dense", "sparse"))]
        if len(listed) >= layers:
            return listed[:layers]
        dense = listed.count(0)
        if listed != sorted(listed):
            raise SettingsError(
                f"{where}: {name} is for {len(listed)} layers, and --num-layers is {layers}; give "
                "--moe-layer-freq with all of them"
            )
    elif "first_k_dense_replace" in architecture.counts:
        dense = config.get("first_k_dense_replace") or 0
    if "decoder_sparse_step" in architecture.counts:
        step, dense_layers = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
        if not isinstance(dense_layers, list) or not all(map(_is_count, dense_layers)):
            raise SettingsError(f"{where}: mlp_only_layers is {dense_layers!r}; give a list of layers")
    sparse = {layer for layer in range(dense, layers) if (layer + 1) % step == 0} - {*dense_layers}
    return [int(layer in sparse) for layer in range(layers)]


def _sharing(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return Megatron's arguments for layers that share selected keys; the file counts layers from 0.

    A list of types has priority. Frequency and offset are returned if they describe the same layers.
    """
    frequency, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset")
    pattern, switch = config.get("index_topk_pattern"), config.get("use_index_cache")
    numbers = {"index_topk_freq": frequency, "index_skip_topk_offset": 0 if offset is None else offset}
    wrong = [f"{name} is {value!r}" for name, value in numbers.items() if not _is_count(value)]
    letters = None if pattern is None else _letters(pattern, config[LAYERS])
    if pattern is not None and letters is None:
        wrong.append(f"index_topk_pattern is {pattern!r}")
    if switch is not None and not isinstance(switch, bool):
        wrong.append(f"use_index_cache is {switch!r}")
    if wrong:
        raise SettingsError(
            f"{where}: {', '.join(wrong)}; give numbers, use_index_cache true or false, and a pattern as a "
            f"letter, F or S, for each of {config[LAYERS]} layers"
        )
    has_types = config.get("indexer_types") is not None
    if has_types:
        letters = _letters(_types(config, where, "indexer_types", ("full", "shared")), config[LAYERS])
    if switch is False:  # in vLLM it turns off pattern and frequency
        if has_types and "S" in (letters or ""):
            raise SettingsError(
                f"{where}: use_index_cache is False, and indexer_types has shared layers; omit one of them"
            )
        return {}
    rule = Sharing(frequency, 2 if offset is None else offset)
    if letters.startswith("S") if letters else rule.frequency > 1 and rule.offset < 1:
        said = f"the pattern {letters}" if letters else f"index_skip_topk_offset {rule.offset}"
        raise SettingsError(
            f"{where}: with {said} layer 0 shares a selection, and no layer below it selects; give 1 or "
            "more, or a pattern that begins with F"
        )
    by_rule = [rule.computes(layer) for layer in range(1, config[LAYERS] + 1)]
    # A pattern that the rule reproduces is returned as the rule.
    if letters and [letter != "S" for letter in letters] != by_rule:
        return {"dsa_indexer_topk_pattern": letters} if "S" in letters else {}
    if rule.frequency == 1:
        return {}
    return {"dsa_indexer_topk_freq": rule.frequency, "dsa_indexer_skip_topk_offset": rule.offset}


def _letters(pattern: str | list[Any], layers: int) -> str | None:
    """Return a pattern as a string with F or S per layer; ``None`` if invalid or of another length."""
    words = list(pattern) if isinstance(pattern, (str, list)) else []
    letters = "".join(_LETTERS.get(str(word).upper(), "") for word in words)
    return letters if len(letters) == len(words) == layers else None


def _types(config: Mapping[str, Any], where: str, name: str, allowed: tuple[str, ...]) -> list[str]:
    """Return the list under key ``name``, after a check that it has one allowed word per layer."""
    types, layers = config[name], config["num_hidden_layers"]
    if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= set(allowed):
        raise SettingsError(
            f"{where}: {name} is no list of {' or '.join(allowed)} for each of {layers} layers"
        )
    return types


def _is_size(name: str, value: Any, architecture: Architecture) -> bool:
    is_count = name in architecture.counts
    if value is None:  # no latent queries, dense layers, shared experts or prediction layers
        return is_count or name in architecture.nullable
    least = 0 if is_count else 1
    return _is_count(value) and least <= value <= (MOST_LAYERS if name in (LAYERS, PREDICTIONS) else _LARGEST)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


# -- other arguments that affect the model's outputs ----------------------------------------------


def arguments_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return all of Megatron's arguments that affect the outputs of the model in ``config.json``.

    Args:
        config: content of ``config.json``, see :func:`read_config`.
        where: source of the configuration as prefix of messages: ``mindspeed_dsa weights: DIR/config.json``.

    Returns:
        Dict from Megatron's argument to its value. ``rope_type``, ``rotary_scaling_factor`` and, with YaRN,
        ``original_max_position_embeddings``, ``beta_fast``, ``beta_slow``, ``mscale`` and ``mscale_all_dim``
        are fields of ``MLATransformerConfig``. Group-limited routing that excludes no group is left out.

    Raises:
        SettingsError: the model type is not supported, sizes are invalid, or Megatron cannot run the model.
    """
    sizes = sizes_of(config, where)
    architecture = find(config, where)
    problems = list(_no_numbers(config, architecture)) or [
        *_without_megatron(config, architecture),
        *_with_more(config, architecture),
        *problems_of(config, architecture),
    ]
    if problems:
        raise SettingsError(f"{where} is a model that Megatron cannot compute: {'; '.join(problems)}")
    indexer = {}
    if sizes["experimental_attention_variant"] == "dsa":
        indexer = dict(MODELS[architecture.indexer])
        if (interleaved := config.get("indexer_rope_interleave")) is not None:
            indexer["dsa_indexer_rope_interleaved"] = interleaved
    if (sizes["mtp_num_layers"] or 0) > 1 and config.get("index_share_for_mtp_iteration"):
        indexer["dsa_indexer_share_for_mtp"] = True
    return {
        **sizes,
        **rotary_of(config, architecture),
        "norm_epsilon": float(architecture.said(config, "rms_norm_eps")),
        "max_position_embeddings": architecture.said(config, "max_position_embeddings"),
        **(_routing(config, architecture) if sizes["num_experts"] else {}),
        **{name: value for name, value in indexer.items() if name not in sizes},
    }


def _routing(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the router's arguments, as far as ``config.json`` determines them."""
    groups, group_topk = _groups(config, architecture)
    scale = architecture.said(config, "routed_scaling_factor")
    routing: dict[str, Any] = {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": group_topk,
        "moe_router_topk_scaling_factor": None if scale is None else float(scale),
    }
    # Probabilities of the selected experts sum to 1 with sigmoid, and with softmax after the selection.
    if architecture.arguments["moe_router_score_function"] == "softmax":
        routing["moe_router_pre_softmax"] = not architecture.said(config, "norm_topk_prob")
    return routing


def _no_numbers(config: Mapping[str, Any], architecture: Architecture) -> Iterator[str]:
    """Yield a message for each value that should be a positive number but is not."""
    rope = parameters_of(config)
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        yield "its rope parameters are not one table of numbers"
        return
    numbers = (
        name for name, usual in architecture.defaults.items() if usual is not None and type(usual) is not bool
    )
    read = [(name, architecture.said(config, name)) for name in numbers]
    read += [(name, table.get(name)) for table in (rope, config) for name in NUMBERS]
    for name, value in read:
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            yield f"{name} is {value!r}, and a number is read"


def _groups(config: Mapping[str, Any], architecture: Architecture) -> tuple[int | None, int | None]:
    """Return the number of expert groups and of groups to route to; ``None`` if no group is excluded."""
    groups, chosen = (architecture.said(config, name) for name in ("n_group", "topk_group"))
    return (groups, chosen) if groups and 0 < chosen < groups else (None, None)


def _without_megatron(config: Mapping[str, Any], architecture: Architecture) -> Iterator[str]:
    """Yield model properties that Megatron's layers or router do not support."""
    only, router = dict(architecture.only), architecture.arguments.get("moe_router_score_function")
    alone = router is not None and config["num_experts_per_tok"] == 1
    # With sigmoid, Megatron normalizes the weights of selected experts iff topk > 1.
    if router == "sigmoid":
        only["norm_topk_prob"] = (not alone,)
    if router == "softmax" and alone and architecture.said(config, "norm_topk_prob"):
        yield "num_experts_per_tok is 1, whose probability would always be 1, and it asks for two or more"
    for name, allowed in only.items():
        if (value := architecture.said(config, name)) not in allowed:
            yield f"{name} is {value!r}, and it has {' or '.join(map(repr, allowed))} only"
    heads, key_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if not architecture.arguments["multi_latent_attention"]:
        if key_heads and heads % key_heads:
            yield f"num_key_value_heads {key_heads} does not divide num_attention_heads {heads}"
        return
    if key_heads not in (None, heads):
        yield f"num_key_value_heads is {key_heads!r}, and latent attention has one for each of {heads} heads"
    if config["q_lora_rank"] is None and "index_topk" in config:
        yield "q_lora_rank is None, and the indexer's queries are made of that latent"
    if not architecture.said(config, "routed_scaling_factor"):
        yield "routed_scaling_factor is 0, which it reads as 1"
    groups, group_topk = _groups(config, architecture)
    # Megatron ranks groups by their topk // group_topk best experts, transformers always by two.
    if groups and group_topk:
        topk, experts = config["num_experts_per_tok"], config["n_routed_experts"]
        if experts % groups:
            yield f"n_group {groups} does not divide n_routed_experts {experts}"
        if topk // group_topk != 2:
            yield (
                f"groups of experts are ranked by their two best, and it ranks them by "
                f"num_experts_per_tok // topk_group = {topk // group_topk}"
            )


def _with_more(config: Mapping[str, Any], architecture: Architecture) -> Iterator[str]:
    """Yield a message for each key of a model part that changes outputs and that is not supported here."""
    for name in ABSENT:
        # Qwen's files give the window's size even where no layer uses it.
        unused = name == "sliding_window" and architecture.said(config, "use_sliding_window") is False
        if config.get(name) and not unused:
            yield f"{name} is {config[name]!r}, and it has no such part"
    types = config.get("layer_types") or ["full_attention"]
    if not isinstance(types, list) or not set(map(str, types)) <= set(ATTENTION_TYPES):
        odd = sorted({*map(str, types)} - {*ATTENTION_TYPES}) if isinstance(types, list) else types
        yield f"layer_types has {odd!r}, and it has attention over all tokens or selected ones in all layers"
    interleaved = config.get("indexer_rope_interleave")
    if interleaved is not None and not isinstance(interleaved, bool):
        yield f"indexer_rope_interleave is {interleaved!r}, and it has True or False only"
