"""Parameters of a model, by part and by how they are cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mindspeed_dsa.tools.planner import layouts
from mindspeed_dsa.tools.planner.job import Job, LayerKind, Layout, Model

Cut = Literal["tensor", "whole", "expert"]
PARTS = (
    "embedding",
    "attention",
    "indexer",
    "dense MLP",
    "routed experts",
    "shared experts",
    "router",
    "norms",
    "output",
    "MTP",
)


@dataclass(frozen=True)
class Weight:
    """Numbers of one weight, or of several that are cut alike.

    Attributes:
        part: one of :data:`PARTS`.
        numbers: in the whole model.
        cut: over tensor parallel ranks, over experts' ranks, or not.
        summed: copies see parts of a sequence under sequence parallelism, so their gradients are summed.
        averaged: copies compute the same gradient; it is averaged all the same.
    """

    part: str
    numbers: int
    cut: Cut = "tensor"
    summed: bool = False
    averaged: bool = False

    def on_rank(self, layout: Layout) -> float:
        """Numbers on one rank that holds its share."""
        if self.cut == "expert":
            return self.numbers / (layout.ep * layout.etp)
        return self.numbers / layout.tp if self.cut == "tensor" else float(self.numbers)


def whole(part: str, numbers: int) -> Weight:
    """A weight of which each tensor parallel rank has a copy that sees its part of a sequence."""
    return Weight(part, numbers, "whole", summed=True)


def norm(model: Model, width: int) -> Weight:
    """RMSNorm's scale, LayerNorm's scale and bias."""
    return whole("norms", width * (2 if model.layer_norm else 1))


def attention(model: Model, selects: bool, sp_tp_sp: bool = False) -> list[Weight]:
    """List the weights of one layer's attention, its norms and the indexer of one that selects included."""
    h, heads = model.hidden, model.heads
    found = [norm(model, h)]
    if not model.latent:
        groups = 2 * model.kv_heads * model.head_dim
        found.append(Weight("attention", h * (heads * model.head_dim + groups)))
        found.append(Weight("attention", heads * model.head_dim * h))
        if model.bias or model.qkv_bias:
            found.append(Weight("attention", heads * model.head_dim + groups))
        if model.bias:
            found.append(whole("attention", h))
        if model.qk_norm:
            found.append(norm(model, 2 * model.head_dim))
        return found
    if model.query_lora:
        found += [
            whole("attention", h * model.query_lora),
            Weight("attention", model.query_lora * heads * model.query_dim),
        ]
        found += [norm(model, model.query_lora)] if model.qk_norm else []
    else:
        found.append(Weight("attention", h * heads * model.query_dim))
    found += [
        whole("attention", h * (model.kv_lora + model.rope)),
        Weight("attention", model.kv_lora * heads * (model.nope + model.value)),
    ]
    found += [norm(model, model.kv_lora)] if model.qk_norm else []
    proj = heads * model.value * h
    found.append(whole("attention", proj) if sp_tp_sp else Weight("attention", proj))
    if model.bias:  # latent projections have none
        found.append(whole("attention", h))
    if selects:
        found.append(Weight("indexer", index_numbers(model), "whole", averaged=True))
    return found


def index_numbers(model: Model) -> int:
    """Count the parameters of an indexer: projections of query, key and weights, and the key's norm."""
    query = (model.query_lora or model.hidden) * model.index_heads * model.index_dim
    return query + model.hidden * (model.index_dim + model.index_heads) + 2 * model.index_dim


def mlp(model: Model, experts: bool) -> list[Weight]:
    """List the weights of one layer's MLP, its norm included."""
    h, matrices = model.hidden, 3 if model.gated else 2
    found = [norm(model, h)]
    if not experts:
        found.append(Weight("dense MLP", matrices * h * model.ffn))
        if model.bias:
            found += [Weight("dense MLP", (matrices - 1) * model.ffn), whole("dense MLP", h)]
        return found
    found.append(whole("router", model.experts * (h + model.bias)))
    of_expert = matrices * h * model.expert_ffn
    if model.bias:
        of_expert += (matrices - 1) * model.expert_ffn + h
    found.append(Weight("routed experts", model.experts * of_expert, "expert"))
    if model.shared_ffn:
        found.append(Weight("shared experts", matrices * h * model.shared_ffn))
    return found


@lru_cache(maxsize=64)
def layer(model: Model, kind: LayerKind, sp_tp_sp: bool = False) -> tuple[Weight, ...]:
    """All weights of one transformer layer."""
    return (*attention(model, kind.selects, sp_tp_sp), *mlp(model, kind.experts))


def embedding(model: Model, part: str = "embedding") -> list[Weight]:
    """List the embedding's weights, of words, and of positions where they are learned."""
    found = [Weight(part, model.vocabulary * model.hidden)]
    if model.learned_positions:
        found.append(Weight(part, model.learned_positions * model.hidden, "whole"))
    return found


def mtp_layer(model: Model, kind: LayerKind, sp_tp_sp: bool = False) -> list[Weight]:
    """A multi-token prediction layer: norms of both inputs, their projection, a layer, a norm."""
    own = [norm(model, 3 * model.hidden), Weight("MTP", 2 * model.hidden * model.hidden)]
    inner = [
        Weight("MTP", each.numbers, each.cut, each.summed, each.averaged)
        for each in layer(model, kind, sp_tp_sp)
    ]
    return [Weight("MTP", own[0].numbers, "whole", summed=True), own[1], *inner]


def model_weights(model: Model) -> list[Weight]:
    """List the weights of the whole model, each once."""
    found = embedding(model)
    for kind in model.kinds:
        found += layer(model, kind)
    found.append(norm(model, model.hidden))
    found += [] if model.tied else [Weight("output", model.vocabulary * model.hidden)]
    for kind in model.mtp_kinds:
        found += mtp_layer(model, kind)
    return found


def rank_weights(job: Job) -> list[list[Weight]]:
    """By pipeline rank."""
    return of_ranks(job.model, job.layout, job.features.sp_tp_sp)


@lru_cache(maxsize=16)
def of_ranks(model: Model, layout: Layout, whole_proj: bool) -> list[list[Weight]]:
    """Return the weights by pipeline rank; with ``whole_proj`` as ``--mla-sp-tp-sp`` cuts them."""
    held = layouts.chunks(layout, model)
    found: list[list[Weight]] = []
    for rank, own in enumerate(held):
        weights: list[Weight] = []
        last = rank == layout.end
        if rank == 0:
            weights += embedding(model)
        if last and layout.pp > 1 and (model.mtp or model.tied):
            weights += embedding(model, "embedding" if model.mtp else "output")
        for chunk in own:
            for number in chunk:
                weights += layer(model, model.kinds[number], whole_proj)
        if last:
            weights.append(norm(model, model.hidden))
            if not model.tied:
                weights.append(Weight("output", model.vocabulary * model.hidden))
            for kind in model.mtp_kinds:
                weights += mtp_layer(model, kind, whole_proj)
        found.append(weights)
    return found


def by_part(weights: Iterable[Weight], layout: Layout | None = None) -> dict[str, float]:
    """Numbers by part, of the whole or on one rank."""
    found: dict[str, float] = {}
    for each in weights:
        numbers = each.numbers if layout is None else each.on_rank(layout)
        found[each.part] = found.get(each.part, 0.0) + numbers
    return {part: found[part] for part in PARTS if part in found}
