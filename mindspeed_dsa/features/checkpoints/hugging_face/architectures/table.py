"""Table of a Hugging Face architecture: keys of ``config.json``, Megatron's arguments, names of weights.

Code that reads and writes models knows architectures only by these tables.

Imports neither torch nor Megatron nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Parts = Mapping[str, tuple[str, ...]]
"""Dict from Megatron's name of a tensor to Hugging Face's tensors whose rows it has."""
LAYERS, PREDICTIONS = "num_hidden_layers", "num_nextn_predict_layers"
SIZES = {
    "num_layers": LAYERS,
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
"""Sizes of every architecture: dict from Megatron's argument to the key."""
COMMON: dict[str, Any] = {
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Megatron's arguments that have the same value for every architecture."""
ABSENT = (
    *("mlp_bias", "swiglu_limit", "attn_logit_softcapping", "final_logit_softcapping"),
    *("sliding_window", "attention_chunk_size", "linear_attn_config", "compress_ratios"),
    *("add_attention_sink", "attention_sink", "attention_sinks", "use_attention_sinks"),
    *("add_full_attention_sink_bias", "add_swa_attention_sink_bias"),
    *("index_kpool", "mla_use_nope", "mhc", "hc_mult"),
)
"""Keys that change a model's outputs, and that no supported architecture may set."""
ATTENTION_TYPES = ("full_attention", "indexed_attention", "deepseek_sparse_attention")
"""Words in ``layer_types`` for layers that the architecture computes anyway."""
MODEL: Parts = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
"""Tensors outside of layers."""
IN_MEMORY: Mapping[str, str] = {
    "mlp.experts.gate_up_proj": "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.down_proj": "mlp.experts.experts.linear_fc2.weight",
    "mlp.gate.weight": "mlp.router.weight",
}
"""Dict from the names of experts and router in transformers' models to Megatron's names."""
NORMS: Parts = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
}


def mlp(ours: str, theirs: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Parts:
    """Return a dict from Megatron's name to Hugging Face's names, for the two weights of a gated MLP.

    Args:
        ours: Megatron's name of the module.
        theirs: Hugging Face's name of the module.
        names: names of the gate's, the upper and the lower projection.
    """
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    return {f"{ours}.linear_fc1.weight": (gate, up), f"{ours}.linear_fc2.weight": (down,)}


def mlp_shapes(theirs: str, width: str) -> dict[str, tuple[str, ...]]:
    """Return the dimensions of a gated MLP's weights, as in :attr:`Architecture.shapes`.

    Args:
        theirs: Hugging Face's name of the module.
        width: keys of the MLP's width.
    """
    up = (width, "hidden_size")
    names = (f"{theirs}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))
    return dict(zip(names, (up, up, ("hidden_size", width)), strict=True))


SHAPES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("vocab_size", "hidden_size")),
    **dict.fromkeys(
        ("model.norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"), ("hidden_size",)
    ),
    **mlp_shapes("mlp", "intermediate_size"),
}
"""Dimensions of weights of every architecture, see :attr:`Architecture.shapes`."""


@dataclass(frozen=True)
class Tensors:
    """Names of the weights in a layer, by the part of the layer.

    Attributes:
        attention: norms and attention, except query projections and indexer.
        query: query projection of models without a latent query.
        latent_query: query projections of models with a latent query.
        indexer: indexer of DSA.
        dense: MLP of a layer without experts.
        routed: router of a layer with experts.
        shared: shared experts.
        experts: an expert; ``{expert}`` stands for its number.
        prediction: multi-token prediction layer outside of its transformer layer. Hugging Face numbers these
            layers after the decoder's.
        repeated: dict from a multi-token prediction layer's copy to the model's own tensor; Megatron stores
            only one of them.
        in_memory: dict from a name in transformers' model to Megatron's. ``save_pretrained`` writes these
            names with ``save_original_format=False``; a tensor of experts then has all experts of a layer.
        buffers: name suffixes of tensors in files that are no weights.
    """

    attention: Parts
    query: Parts = field(default_factory=dict)
    latent_query: Parts = field(default_factory=dict)
    indexer: Parts = field(default_factory=dict)
    dense: Parts = field(default_factory=dict)
    routed: Parts = field(default_factory=dict)
    shared: Parts = field(default_factory=dict)
    experts: Parts = field(default_factory=dict)
    prediction: Parts = field(default_factory=dict)
    repeated: Mapping[str, str] = field(default_factory=dict)
    in_memory: Mapping[str, str] = field(default_factory=lambda: IN_MEMORY)
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)

    @property
    def layer(self) -> Parts:
        """Names of all tensors that a transformer layer may have, dense or with experts."""
        return {
            **self.query,
            **self.latent_query,
            **self.attention,
            **self.indexer,
            **self.dense,
            **self.routed,
            **self.shared,
            **self.experts,
        }


@dataclass(frozen=True)
class Architecture:
    """Table of one Hugging Face architecture: configuration keys, Megatron's arguments, names of weights.

    Attributes:
        types: values of ``model_type``; the first one is written.
        class_name: class of transformers, for ``architectures``.
        tensors: names of weights.
        sizes: dict from Megatron's argument to the key with its value, a positive number.
        sums: dict from key to other keys; its value is the sum of their values.
        defaults: values of transformers' class for keys that a file may leave out.
        only: dict from key to the values that Megatron can compute; the first one is the class's default, and
            is written.
        ropes: kinds of rotary embeddings that Megatron can compute.
        arguments: Megatron's arguments that are the same for every model, beyond :data:`COMMON`.
        marks: dict from Megatron's argument to whether a job of this architecture sets it, for arguments that
            tell architectures of DSA apart.
        nullable: keys of sizes that may be null.
        counts: keys with a number that may be 0 or absent.
        lists: keys with a word for each layer.
        aliases: dict from key to another name of it in files.
        indexer: model in :data:`mindspeed_dsa.megatron.dsa.MODELS` with the same indexer; empty: none.
        shapes: dict from a weight's name, without ``model.layers.N.``, to its dimensions: keys, sums of keys
            and products of both, such as ``a * (b + c)``.
        never_fp8: name suffixes of modules that loaders of FP8 files know not to be in FP8; others need an
            entry in ``modules_to_not_convert``.
        mindspeed_llm: MindSpeed-LLM's name of the architecture, in ``--model-type-hf``.
    """

    types: tuple[str, ...]
    class_name: str
    tensors: Tensors
    sizes: Mapping[str, str]
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    ropes: tuple[str, ...]
    arguments: Mapping[str, Any]
    marks: Mapping[str, bool] = field(default_factory=dict)
    nullable: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    sums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    indexer: str = ""
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    never_fp8: tuple[str, ...] = ("embed_tokens", "lm_head")
    mindspeed_llm: str = ""

    def said(self, config: Mapping[str, Any], name: str) -> Any:
        """Return a key's value in ``config.json``, or transformers' default if the file lacks the key.

        Null counts as a missing key, except for a size that may be null.
        """
        value = config.get(name, config.get(self.aliases.get(name, name)))
        if value is None:
            if name in config and name in self.nullable:
                return None
            return self.only[name][0] if name in self.only else self.defaults.get(name)
        return value

    def has(self, config: Mapping[str, Any], name: str) -> bool:
        """Return whether ``config.json`` has the key of a size, or the key has a default."""
        return not {name, self.aliases.get(name)}.isdisjoint(config) or name in self.defaults
