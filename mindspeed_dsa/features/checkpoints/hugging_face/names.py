"""Names of weights in Megatron's checkpoints and in Hugging Face's files, from an architecture's table.

A distributed checkpoint names a tensor independently of the layout of the job that wrote it. A tensor,
pipeline or expert parallel rank holds a region of it. If all layers are alike, a checkpoint stacks them along
a first axis, and it stacks experts along the next axis. Both indices are part of a :class:`Place`. Norms in
front of some projections have two names: a separate one, and one as part of the fused projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import (
    BY_TYPE,
    LAYER_TENSORS,
    MODEL_TENSORS,
    PREDICTION_TENSORS,
)
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.table import MODEL, Architecture
from mindspeed_dsa.features.checkpoints.hugging_face.flags import prediction_layers, query_groups
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import shortened
from mindspeed_dsa.runs.files import RunError

if TYPE_CHECKING:
    from typing_extensions import Self

PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors whose rows Megatron pads so that tensor parallel ranks can divide them."""

_OTHER_NAMES = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
)
_LAYERS = re.compile(r"(?P<block>decoder|mtp)\.layers\.(?:(?P<layer>\d+)\.)?(?P<rest>.+)")
_EXPERTS, _GROUPED = "mlp.experts.", "self_attention.linear_qkv."
_INNER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.")
"""Prefix of the transformer layer inside a multi-token prediction layer, in older and newer releases."""


_MENTIONED = 8
"""Maximum number of names in one message; a model can have tens of thousands."""


class UnknownName(RunError):
    """Error for a tensor of a checkpoint or model that the table lacks."""


@dataclass(frozen=True, order=True)
class Place:
    """Position of a tensor in a model.

    Attributes:
        block: ``""`` outside of layers, ``"decoder"``, or ``"mtp"``.
        layer: index in the block from 0; -1 outside of layers.
        expert: index among all experts of the layer; -1 for other tensors.
        name: Megatron's name of the tensor in the block.
        inner: whether the tensor is in the transformer layer of a multi-token prediction layer.
    """

    block: str
    layer: int
    expert: int
    name: str
    inner: bool = False

    @property
    def indexer(self) -> bool:
        """Return whether the tensor belongs to an indexer."""
        return ".indexer." in self.name

    def __str__(self) -> str:
        """Return the tensor's name in messages."""
        if not self.block:
            return self.name
        expert = f" of expert {self.expert}" if self.expert >= 0 else ""
        where = "layer" if self.block == "decoder" else "prediction layer"
        return f"{self.name} of {where} {self.layer}{expert}"


def listed(names: Sequence[str]) -> str:
    """Return names for a message: the first ones, and the number of the rest."""
    return shortened(names, _MENTIONED)


def place_of(key: str, offset: Sequence[int] = ()) -> tuple[Place, int]:
    """Return the place of a checkpoint tensor, and the number of its leading stacked axes.

    Indices of layer and expert that the key does not state are taken from the offset along these axes.

    Args:
        key: key of a tensor in a distributed checkpoint, without a prefix.
        offset: offset of a region in the tensor.

    Raises:
        UnknownName: the table lacks the name.
    """
    if key in MODEL_TENSORS:
        return Place("", -1, -1, key), 0
    matched = _LAYERS.fullmatch(key)
    if matched is None:
        raise _unknown(key)
    # "decoder.layers.mlp.experts.experts.linear_fc2.weight", offset (3, 7, 0, 0): layer 3, expert 7, 2 axes.
    block, rest, used = matched["block"], matched["rest"], 0
    if matched["layer"] is None:
        layer, used = _number(key, offset, used)
    else:
        layer = int(matched["layer"])
    inner = block == "mtp" and _INNER.match(rest) is not None
    rest = _INNER.sub("", rest, count=1) if inner else rest
    for other, name in _OTHER_NAMES:
        rest = name if rest == other else rest
    if rest not in (LAYER_TENSORS if block == "decoder" or inner else PREDICTION_TENSORS):
        raise _unknown(key)
    expert = -1
    if rest.startswith(_EXPERTS):
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
        f"mindspeed_dsa weights: {key} has no counterpart in the files of {', '.join(BY_TYPE)}; the model "
        "has a module that their files do not have, or a name that this release of Megatron has changed"
    )


class Segment(NamedTuple):
    """Rows of a Hugging Face tensor.

    Attributes:
        name: name of the tensor.
        first: first row.
        last: row after the last one.
    """

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Shape:
    """Layers of a model, as far as they determine its tensors.

    Attributes:
        architecture: names of the tensors.
        experts: number of experts per decoder layer; 0 for a dense layer.
        indexers: one bool per decoder layer, true if the layer owns an indexer.
        latent_query: whether queries are computed from a latent.
        shared_expert: whether layers with experts have a shared expert.
        prediction_indexers: one bool per multi-token prediction layer, true if it owns an indexer. In other
            respects these layers are like the last decoder layer.
        tied: whether the output layer shares the embedding's weight.
        groups: number of key heads, each with a group of queries.
        queries: number of query heads in a group.
    """

    architecture: Architecture
    experts: tuple[int, ...]
    indexers: tuple[bool, ...]
    latent_query: bool = True
    shared_expert: bool = True
    prediction_indexers: tuple[bool, ...] = ()
    tied: bool = False
    groups: int = 1
    queries: int = 1

    @classmethod
    def of(cls, args: Any, architecture: Architecture) -> Self:
        """Build the shape from a job's arguments, or from a model configuration with Megatron's names."""
        layers = args.num_layers
        experts = getattr(args, "num_experts", None) or getattr(args, "num_moe_experts", None) or 0
        frequency = getattr(args, "moe_layer_freq", 1)
        if isinstance(frequency, int):
            frequency = [int(layer % frequency == 0) for layer in range(layers)]
        groups = query_groups(args) or 1
        uses_dsa = getattr(args, "experimental_attention_variant", None) == "dsa"
        sharing, predictions = Sharing.of(args), prediction_layers(args) or 0
        return cls(
            architecture=architecture,
            experts=tuple(experts * bool(has) for has in frequency),
            indexers=tuple(uses_dsa and sharing.computes(layer) for layer in range(1, layers + 1)),
            latent_query=bool(getattr(args, "q_lora_rank", None)),
            shared_expert=bool(getattr(args, "moe_shared_expert_intermediate_size", None)),
            prediction_indexers=tuple(
                uses_dsa and sharing.mtp_computes(layer) for layer in range(1, predictions + 1)
            ),
            tied=not getattr(args, "untie_embeddings_and_output_weights", True),
            groups=groups,
            queries=getattr(args, "num_attention_heads", groups) // groups,
        )

    @property
    def layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.experts)

    def places(self) -> Iterator[Place]:
        """Yield the place of every tensor, in the order of the model."""
        yield Place("", -1, -1, "embedding.word_embeddings.weight")
        for layer, (experts, indexer) in enumerate(zip(self.experts, self.indexers, strict=True)):
            yield from self._layer("decoder", layer, experts, indexer)
        yield Place("", -1, -1, "decoder.final_layernorm.weight")
        if not self.tied:
            yield Place("", -1, -1, "output_layer.weight")
        for layer, indexer in enumerate(self.prediction_indexers):
            yield from (Place("mtp", layer, -1, name) for name in self.architecture.tensors.prediction)
            yield from self._layer("mtp", layer, self.experts[-1], indexer)

    def _layer(self, block: str, layer: int, experts: int, indexer: bool) -> Iterator[Place]:
        inner, tensors = block == "mtp", self.architecture.tensors
        parts = [tensors.latent_query if self.latent_query else tensors.query, tensors.attention]
        parts += [tensors.indexer] if indexer else []
        parts += [tensors.routed] if experts else [tensors.dense]
        parts += [tensors.shared] if experts and self.shared_expert else []
        yield from (Place(block, layer, -1, name, inner) for part in parts for name in part)
        for expert in range(experts):
            yield from (Place(block, layer, expert, name, inner) for name in tensors.experts)

    def names(self, place: Place) -> tuple[str, ...]:
        """Return the names of the Hugging Face tensors that Megatron's tensor consists of.

        Raises:
            UnknownName: the architecture has no such tensor.
        """
        tensors = self.architecture.tensors
        if not place.block:
            return MODEL[place.name]
        # Hugging Face numbers prediction layers after the decoder: with 61 layers, the first one is 61.
        number = place.layer + (self.layers if place.block == "mtp" else 0)
        table = tensors.layer if place.block == "decoder" or place.inner else tensors.prediction
        if place.name not in table:
            raise _unknown(str(place))
        layer = f"model.layers.{number}."
        return tuple(layer + name.format(expert=place.expert) for name in table[place.name])

    def segments(self, place: Place, rows: int) -> list[Segment]:
        """Return the rows of Hugging Face tensors that form Megatron's tensor, in the order of its rows.

        Args:
            place: position of the tensor.
            rows: number of rows of Megatron's tensor.
        """
        names = self.names(place)
        # A gated projection is gate_proj and up_proj one above the other: two names share the rows.
        groups, parts = 1, [1] * len(names)
        if place.name.startswith(_GROUPED):
            # With 8 query heads, 2 key heads: heads 0-3 of q, head 0 of k and of v, heads 4-7 of q, ...
            groups, parts = self.groups, [self.queries, 1, 1]
        height = rows // (groups * sum(parts))
        return [
            Segment(name, group * part * height, (group + 1) * part * height)
            for group in range(groups)
            for name, part in zip(names, parts, strict=True)
        ]

    def repeated(self) -> Iterator[tuple[str, str]]:
        """Yield pairs ``(copy, original)``: tensor of an MTP layer in the files, and the model's tensor."""
        for layer in range(len(self.prediction_indexers)):
            for name, original in self.architecture.tensors.repeated.items():
                yield f"model.layers.{self.layers + layer}.{name}", original

    def idle(self) -> Iterator[str]:
        """Yield the files' names of indexer tensors in layers that have no indexer in Megatron's model."""
        owners = (*self.indexers, *self.prediction_indexers)
        for layer, owns in enumerate(owners if any(owners) else ()):
            for names in self.architecture.tensors.indexer.values() if not owns else ():
                yield from (f"model.layers.{layer}.{name}" for name in names)
