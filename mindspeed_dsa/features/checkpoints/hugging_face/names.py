"""Names of weights in Megatron's checkpoints and in Hugging Face's files: one table for both directions.

A distributed checkpoint names a tensor whatever the layout of the job that wrote it, and a tensor parallel,
pipeline or expert parallel rank has a region of it. Where all layers are alike, a checkpoint stacks them
along a first axis, and it stacks experts along the next; both count as part of the name here. Norms before
some projections have two names: their own, and one of the projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.features.checkpoints.hugging_face.flags import prediction_layers
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.runs.files import RunError

if TYPE_CHECKING:
    from typing_extensions import Self

MODEL = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
"""Tensors outside of layers. Hugging Face's, one after another along the rows, are Megatron's."""
INDEXER = {
    "self_attention.core_attention.indexer.linear_wq_b.weight": ("self_attn.indexer.wq_b.weight",),
    "self_attention.core_attention.indexer.linear_wk.weight": ("self_attn.indexer.wk.weight",),
    "self_attention.core_attention.indexer.k_norm.weight": ("self_attn.indexer.k_norm.weight",),
    "self_attention.core_attention.indexer.k_norm.bias": ("self_attn.indexer.k_norm.bias",),
    "self_attention.core_attention.indexer.linear_weights_proj.weight": (
        "self_attn.indexer.weights_proj.weight",
    ),
}
QUERY = {"self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",)}
LATENT_QUERY = {
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
}
ATTENTION = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
}
DENSE = {
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
ROUTED = {
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
}
SHARED_EXPERTS = {
    "mlp.shared_experts.linear_fc1.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
}
EXPERTS = {
    "mlp.experts.experts.linear_fc1.weight": (
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    "mlp.experts.experts.linear_fc2.weight": ("mlp.experts.{expert}.down_proj.weight",),
}
LAYER: Mapping[str, tuple[str, ...]] = {
    **QUERY,
    **LATENT_QUERY,
    **ATTENTION,
    **INDEXER,
    **DENSE,
    **ROUTED,
    **SHARED_EXPERTS,
    **EXPERTS,
}
"""Tensors of a transformer layer, of the decoder or below a layer of multi-token prediction."""
PREDICTION = {
    "enorm.weight": ("enorm.weight",),
    "hnorm.weight": ("hnorm.weight",),
    "eh_proj.weight": ("eh_proj.weight",),
    "final_layernorm.weight": ("shared_head.norm.weight",),
}
"""Tensors of a layer of multi-token prediction outside of its transformer layer. Hugging Face numbers these
layers behind the decoder's."""
REPEATED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Tensors of a layer of multi-token prediction that repeat the model's; Megatron has them once."""
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors whose rows Megatron pads to a multiple that ranks divide."""

_OTHER_NAMES = (
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
)
_LAYERS = re.compile(r"(?P<block>decoder|mtp)\.layers\.(?:(?P<layer>\d+)\.)?(?P<rest>.+)")
_INNER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.")
"""The transformer layer in a layer of multi-token prediction, in older and newer releases."""


_MENTIONED = 8
"""Names in one message; there can be tens of thousands."""


class UnknownName(RunError):
    """A tensor of a checkpoint, or of a model, that the table does not have."""


@dataclass(frozen=True, order=True)
class Place:
    """One tensor of a model.

    Attributes:
        block: ``""`` outside of layers, ``"decoder"``, or ``"mtp"``.
        layer: counted from 0 in its block; -1 outside of layers.
        expert: of all experts of the layer; -1 for what is no expert's.
        name: key in the table.
        inner: the tensor lies in the transformer layer of a layer of multi-token prediction.
    """

    block: str
    layer: int
    expert: int
    name: str
    inner: bool = False

    @property
    def indexer(self) -> bool:
        """Return whether the tensor is an indexer's."""
        return self.name in INDEXER

    def theirs(self, layers: int) -> tuple[str, ...]:
        """Return the names of Hugging Face's tensors whose rows, one after another, are this tensor.

        Args:
            layers: of the decoder.
        """
        if not self.block:
            return MODEL[self.name]
        number = self.layer + (layers if self.block == "mtp" else 0)
        names = LAYER[self.name] if self.block == "decoder" or self.inner else PREDICTION[self.name]
        return tuple(f"model.layers.{number}.{name}".format(expert=self.expert) for name in names)

    def __str__(self) -> str:
        """Name the tensor as messages do."""
        if not self.block:
            return self.name
        expert = f" of expert {self.expert}" if self.expert >= 0 else ""
        where = "layer" if self.block == "decoder" else "prediction layer"
        return f"{self.name} of {where} {self.layer}{expert}"


def listed(names: Sequence[str]) -> str:
    """Return names for a message; of many the first ones, and the number of the others."""
    rest = len(names) - _MENTIONED
    return ", ".join(names[:_MENTIONED]) + (f" and {rest} more" if rest > 0 else "")


def place_of(key: str, offset: Sequence[int] = ()) -> tuple[Place, int]:
    """Return the tensor that a key names, and how many first axes of the offset belong to its name.

    Args:
        key: of a tensor in a distributed checkpoint, without a prefix.
        offset: of a region in it.

    Raises:
        UnknownName: the table does not have it.
    """
    if key in MODEL:
        return Place("", -1, -1, key), 0
    matched = _LAYERS.fullmatch(key)
    if matched is None:
        raise _unknown(key)
    block, rest, used = matched["block"], matched["rest"], 0
    if matched["layer"] is None:
        layer, used = _number(key, offset, used)
    else:
        layer = int(matched["layer"])
    inner = block == "mtp" and _INNER.match(rest) is not None
    rest = _INNER.sub("", rest, count=1) if inner else rest
    for other, name in _OTHER_NAMES:
        rest = name if rest == other else rest
    if rest not in (LAYER if block == "decoder" or inner else PREDICTION):
        raise _unknown(key)
    expert = -1
    if rest in EXPERTS and (inner or block == "decoder"):
        expert, used = _number(key, offset, used)
    return Place(block, layer, expert, rest, inner), used


def _number(key: str, offset: Sequence[int], used: int) -> tuple[int, int]:
    if used >= len(offset):
        raise RunError(
            f"mindspeed_dsa weights: {key} is stacked, and its region has no offset along that axis"
        )
    return offset[used], used + 1


def _unknown(key: str) -> UnknownName:
    return UnknownName(
        f"mindspeed_dsa weights: {key} has no counterpart in DeepSeek-V3, DeepSeek-V3.2 or GLM-5; the model "
        "has a module that their files do not have, or a name that this release of Megatron has changed"
    )


@dataclass(frozen=True)
class Shape:
    """Layers of a model, as far as they decide which tensors it has.

    Attributes:
        experts: of each decoder layer, 0 where it is dense.
        indexers: for each decoder layer whether it owns an indexer.
        latent_query: queries come from a latent.
        shared_expert: layers with experts have a shared one.
        prediction_indexers: for each layer of multi-token prediction whether it owns an indexer; otherwise
            these layers are like the decoder's last.
        tied: the output layer is the embedding.
    """

    experts: tuple[int, ...]
    indexers: tuple[bool, ...]
    latent_query: bool = True
    shared_expert: bool = True
    prediction_indexers: tuple[bool, ...] = ()
    tied: bool = False

    @classmethod
    def of(cls, args: Any) -> Self:
        """Build from a job's arguments or a model's configuration, by Megatron's names."""
        layers = args.num_layers
        experts = getattr(args, "num_experts", None) or getattr(args, "num_moe_experts", None) or 0
        frequency = getattr(args, "moe_layer_freq", 1)
        if isinstance(frequency, int):
            frequency = [int(layer % frequency == 0) for layer in range(layers)]
        uses_dsa = getattr(args, "experimental_attention_variant", None) == "dsa"
        sharing, predictions = Sharing.of(args), prediction_layers(args) or 0
        return cls(
            experts=tuple(experts * bool(has) for has in frequency),
            indexers=tuple(uses_dsa and sharing.computes(layer) for layer in range(1, layers + 1)),
            latent_query=bool(getattr(args, "q_lora_rank", None)),
            shared_expert=bool(getattr(args, "moe_shared_expert_intermediate_size", None)),
            prediction_indexers=tuple(
                uses_dsa and sharing.mtp_computes(layer) for layer in range(1, predictions + 1)
            ),
            tied=not getattr(args, "untie_embeddings_and_output_weights", True),
        )

    @property
    def layers(self) -> int:
        """Return how many layers the decoder has."""
        return len(self.experts)

    def places(self) -> Iterator[Place]:
        """Yield every tensor in the order of the model."""
        yield Place("", -1, -1, "embedding.word_embeddings.weight")
        for layer, (experts, indexer) in enumerate(zip(self.experts, self.indexers, strict=True)):
            yield from self._layer("decoder", layer, experts, indexer)
        yield Place("", -1, -1, "decoder.final_layernorm.weight")
        if not self.tied:
            yield Place("", -1, -1, "output_layer.weight")
        for layer, indexer in enumerate(self.prediction_indexers):
            yield from (Place("mtp", layer, -1, name) for name in PREDICTION)
            yield from self._layer("mtp", layer, self.experts[-1], indexer)

    def _layer(self, block: str, layer: int, experts: int, indexer: bool) -> Iterator[Place]:
        inner = block == "mtp"
        parts: list[Mapping[str, tuple[str, ...]]] = [LATENT_QUERY if self.latent_query else QUERY, ATTENTION]
        parts += [INDEXER] if indexer else []
        parts += [ROUTED] if experts else [DENSE]
        parts += [SHARED_EXPERTS] if experts and self.shared_expert else []
        yield from (Place(block, layer, -1, name, inner) for part in parts for name in part)
        for expert in range(experts):
            yield from (Place(block, layer, expert, name, inner) for name in EXPERTS)
