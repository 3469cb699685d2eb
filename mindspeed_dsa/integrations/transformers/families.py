"""Table of the supported model families: the only place that knows models of transformers by name.

A family is one row of :data:`FAMILIES`. Its columns say how its indexer and its decoder layer differ from
DeepSeek-V3.2's. Everything else of an attention layer is transformers' own code: projections, norms, gates,
scaled queries, caches, and keys that layers share.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

_MODELS = "transformers.models"


@dataclass(frozen=True)
class Family:
    """Models whose attention and indexer have one interface.

    Attributes:
        module: transformers module that defines the classes, without the part that all models share.
        attention: name of the attention's class.
        indexer: name of the indexer's class.
        decoder: name of the class of the stack of layers, without a head.
        rotate: name of the module's function that applies the indexer's rotary embedding.
        rope_at: whether the rotated dimensions of the indexer's heads are the first or the last ones.
        has_rope: indexer's attribute that is true in layers with a rotary embedding; "" if all have one.
        query_norm: indexer's norm of the hidden states, from which its queries are then projected; "" if they
            are projected from the attention's latent queries.
        query_scale: indexer's module that scales its queries by their positions, or "".
        wide_key_norm: whether the indexer's key norm computes in the dtype of its parameters.
        window: attention's attribute with the window of layers that have no indexer; "" if a layer without
            one shares the previous selection.
        after_attention: modules of a decoder layer that get the sum of its input and its attention.
        after_layers: modules of the decoder that get the output of the last layer.
    """

    module: str
    attention: str
    indexer: str
    decoder: str
    rotate: str
    rope_at: Literal["first", "last"] = "first"
    has_rope: str = ""
    query_norm: str = ""
    query_scale: str = ""
    wide_key_norm: bool = False
    window: str = ""
    after_attention: tuple[str, ...] = ("post_attention_layernorm",)
    after_layers: tuple[str, ...] = ("norm",)

    def named(self, name: str) -> Any:
        """Return the class or function ``name`` of the family's transformers module."""
        return getattr(import_module(f"{_MODELS}.{self.module}"), name)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the positional arguments of the indexer's ``forward``."""
        latent = () if self.query_norm else ("q_resid",)
        return ("hidden_states", *latent, "position_embeddings", "attention_mask", "position_ids")

    def selects(self, attention: Any) -> bool:
        """Return whether a layer attends to selected keys: by its own indexer or an earlier layer's."""
        return attention.indexer is not None or not self.window

    def query(self, indexer: Any, hidden: Tensor, latent: Tensor | None, positions: Tensor | None) -> Tensor:
        """Return the indexer's queries before the rotary embedding, ``[batch, rows, heads, head_dim]``.

        Args:
            indexer: transformers' indexer.
            hidden: ``[batch, rows, hidden_size]``.
            latent: ``[batch, rows, q_lora_rank]``, the attention's latent queries, if the indexer takes them.
            positions: ``[batch, rows]`` positions of the tokens; read only where queries are scaled.
        """
        source = getattr(indexer, self.query_norm)(hidden) if self.query_norm else latent
        query: Tensor = indexer.wq_b(source).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        if self.query_scale:
            query = getattr(indexer, self.query_scale)(query, positions, head_dim_first=False)
        return query

    def key(self, indexer: Any, hidden: Tensor) -> Tensor:
        """Return the indexer's keys before the rotary embedding, ``[batch, rows, head_dim]``."""
        key: Tensor = indexer.wk(hidden)
        if self.wide_key_norm:
            key = key.to(indexer.k_norm.weight.dtype)
        key = indexer.k_norm(key)
        return key.to(hidden.dtype) if self.wide_key_norm else key

    def rotated(self, indexer: Any, query: Tensor, key: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
        """Return queries and keys with the rotary embedding; shapes and dtypes as of the arguments.

        Args:
            indexer: transformers' indexer.
            query: queries before the embedding.
            key: keys before the embedding.
            angles: cosines and sines, ``[batch, rows, qk_rope_head_dim]`` each.
        """
        if self.has_rope and not getattr(indexer, self.has_rope):
            return query, key
        # One head of keys: [batch, rows, 1, head_dim]
        rope, key = indexer.qk_rope_head_dim, key.unsqueeze(2)
        turning, still = slice(None, rope), slice(rope, None)
        if self.rope_at == "last":
            still, turning = slice(None, -rope), slice(-rope, None)
        turned = self.named(self.rotate)(query[..., turning], key[..., turning], *angles, unsqueeze_dim=2)
        # Angles of dots3_note are fp32 in a bf16 model; NPUs' fused indexer takes 16-bit operands only.
        pairs = ((x.to(y.dtype), y[..., still]) for x, y in zip(turned, (query, key), strict=True))
        query, key = (torch.cat(pair if self.rope_at == "first" else pair[::-1], dim=-1) for pair in pairs)
        return query, key.squeeze(2)


def _family(folder: str, prefix: str, rotate: str, **columns: Any) -> Family:
    """Return the row of a module whose classes are named ``<prefix>Attention`` and so on."""
    names = {part.lower(): f"{prefix}{part}" for part in ("Attention", "Indexer")}
    columns = {"decoder": f"{prefix}Model", **names, **columns}
    return Family(f"{folder}.modeling_{folder}", rotate=rotate, **columns)


_HALVES, _PAIRS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"
_MISTRAL = _family(
    "mistral_large4",
    "MistralLarge4Text",
    _PAIRS,
    has_rope="use_rope",
    query_norm="q_input_norm",
    query_scale="softmax_scaling",
)
_DOTS = _family("dots3_note", "Dots3NoteText", _PAIRS, window="sliding_window")
_HY: dict[str, Any] = {
    "rope_at": "last",
    "wide_key_norm": True,
    # The residual streams are mixed before each norm.
    "after_attention": ("ffn_hc",),
    "after_layers": ("hc_head",),
}
_HY_WITH_IMAGES = _family("hy_v4_vl", "HYV4VL", _HALVES, decoder="HYV4VLTextModel", **_HY)

FAMILIES = {
    "deepseek_v32": _family("deepseek_v32", "DeepseekV32", _HALVES),
    "glm_moe_dsa": _family("glm_moe_dsa", "GlmMoeDsa", _PAIRS),
    "axk2": _family("axk2", "AXK2", _HALVES),
    "hy_v4": _family("hy_v4", "HYV4", _HALVES, **_HY),
    "hy_v4_vl": _HY_WITH_IMAGES,
    "hy_v4_vl_text": _HY_WITH_IMAGES,
    "mistral_large4": _MISTRAL,
    "mistral_large4_text": _MISTRAL,
    "dots3_note": _DOTS,
    "dots3_note_text": _DOTS,
}
"""Supported families by ``model_type``; a model with images has the family of its text model."""

_OF_KEY_VALUE_HEADS = "a selection of its own for every key-value head"
_OF_LEARNED_MEANS = "an indexer that scores learned means of keys"
_OF_MEANS = "an indexer that scores means of the keys that a token sees"

MISSING = {
    "deepseek_v4": "attention to keys that are compressed from several tokens",
    "glm5_next": _OF_LEARNED_MEANS,
    "glm5_next_text": _OF_LEARNED_MEANS,
    "kimi_linear": "linear attention (KDA)",
    "minimax_m3_vl": _OF_KEY_VALUE_HEADS,
    "minimax_m3_vl_text": _OF_KEY_VALUE_HEADS,
    "qwen4_exp": _OF_MEANS,
    "qwen4_exp_text": _OF_MEANS,
}
"""First thing that models need and these operators lack, by ``model_type``."""
