"""Keys of a written ``config.json`` that other programs read, and their defaults where a key is missing.

A model without one of these keys loads here, and is another model elsewhere: without ``scoring_func`` for
example an engine scores experts by a softmax. A written configuration has all of them.

Imports neither torch nor Megatron nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

NEEDED = "an error"
"""Default of a reader that cannot do without the key."""
_LATENT, _EXPERTS, _INDEXER, _SHARING = "kv_lora_rank", "topk_method", "index_topk", "index_topk_pattern"


class Key(NamedTuple):
    """Key of ``config.json``.

    Attributes:
        name: name of the key.
        where: another key; only models that have it need this key. Empty for all models.
        readers: dict from program to the default that it uses if the key is missing, or :data:`NEEDED`.
    """

    name: str
    where: str
    readers: Mapping[str, Any]


KEYS = (
    Key("architectures", "", {"vLLM": NEEDED, "SGLang": NEEDED, "TensorRT-LLM": NEEDED}),
    Key("model_type", "", {"transformers": NEEDED, "mcore-bridge": NEEDED}),
    Key("dtype", "", {"transformers": None}),
    Key("torch_dtype", "", {"transformers 4": None}),
    Key("rope_parameters", "", {"transformers": {"rope_theta": 10000.0, "rope_type": "default"}}),
    Key("rope_theta", "", {"transformers 4": 10000.0}),
    Key("rope_scaling", "", {"transformers 4": None}),
    Key("max_position_embeddings", "", {"transformers": 4096}),
    Key("bos_token_id", "", {"transformers": 0}),
    Key("eos_token_id", "", {"transformers": 1}),
    Key("pad_token_id", "", {"transformers": None}),
    Key("tie_word_embeddings", "", {"transformers": False}),
    Key("head_dim", _LATENT, {"transformers": 64}),
    Key("qk_head_dim", _LATENT, {"transformers": 192}),
    Key("rope_interleave", _LATENT, {"transformers": True}),
    Key("scoring_func", _EXPERTS, {"vLLM": "softmax", "vllm-ascend": "softmax"}),
    Key("topk_method", _EXPERTS, {"vLLM": NEEDED, "verl": NEEDED, "MindSpeed-LLM": NEEDED}),
    Key("moe_layer_freq", _EXPERTS, {"vLLM": 1, "MindIE": NEEDED, "verl": NEEDED}),
    Key("first_k_dense_replace", _EXPERTS, {"vLLM": NEEDED, "transformers": 3}),
    Key("norm_topk_prob", _EXPERTS, {"vLLM": NEEDED, "transformers": True}),
    Key("routed_scaling_factor", _EXPERTS, {"vLLM": 1.0, "transformers": 2.5}),
    Key("n_group", _EXPERTS, {"vLLM": 1, "transformers": 8}),
    Key("topk_group", _EXPERTS, {"vLLM": 1, "transformers": 4}),
    Key("num_nextn_predict_layers", _EXPERTS, {"vLLM": 0, "transformers": 1}),
    Key("indexer_rope_interleave", _INDEXER, {"vLLM": False, "mlx-lm": False, "Megatron-Bridge": NEEDED}),
    Key("index_topk_pattern", _SHARING, {"vLLM": None, "SGLang": None, "TensorRT-LLM": None}),
    Key("use_index_cache", _SHARING, {"vLLM": False}),
)
"""Rows of the contract; transformers' defaults are from its DeepSeek-V3 class."""


def lacking(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each missing key: the programs that read it, and the defaults that they use.

    Args:
        config: content of a ``config.json``.
    """
    for key in KEYS:
        if key.name not in config and (not key.where or config.get(key.where) is not None):
            takes = ", ".join(f"{reader} takes {default!r}" for reader, default in key.readers.items())
            yield f"it lacks {key.name}: {takes}"
