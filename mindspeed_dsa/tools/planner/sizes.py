"""Number of parameters of a model, by part of the model and by the kind of parallelism that splits them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mindspeed_dsa.tools.planner import layouts
from mindspeed_dsa.tools.planner.job import Job, LayerKind, Layout, Model

Cut = Literal["tensor", "whole", "expert", "vocabulary"]
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


MULTIPLIED = frozenset(PARTS) - {"embedding", "router", "norms", "output"}
"""Parts whose weights Transformer Engine multiplies in fp8."""


@dataclass(frozen=True)
class Weight:
    """Number of parameters of one weight, or of several that are split in the same way.

    Attributes:
        part: one of :data:`PARTS`.
        numbers: number of parameters in the whole model.
        cut: kind of parallelism that splits the weight: tensor parallel, expert parallel, none, or for
            ``vocabulary`` tensor and context parallel.
        summed: whether gradients of replicas on TP ranks are summed, because under sequence parallelism each
            replica sees only a part of the tokens.
        averaged: whether gradients of replicas on TP ranks are averaged, although all are equal.
    """

    part: str
    numbers: int
    cut: Cut = "tensor"
    summed: bool = False
    averaged: bool = False

    def on_rank(self, layout: Layout) -> float:
        """Return the number of the parameters that one rank holds."""
        if self.cut == "expert":
            return self.numbers / (layout.ep * layout.etp)
        if self.cut == "vocabulary":
            return self.numbers / (layout.tp * layout.cp)
        return self.numbers / layout.tp if self.cut == "tensor" else float(self.numbers)


def whole(part: str, numbers: int) -> Weight:
    """Return a :class:`Weight` that TP ranks replicate and for which they sum gradients."""
    return Weight(part, numbers, "whole", summed=True)


def norm(model: Model, width: int) -> Weight:
    """Return a norm's weights: RMSNorm's scale, or LayerNorm's scale and bias."""
    return whole("norms", width * (2 if model.layer_norm else 1))


def attention(model: Model, selects: bool, sp_tp_sp: bool = False) -> list[Weight]:
    """Return the weights of one layer's attention with its norms and, if it selects keys, its indexer."""
    h, heads = model.hidden, model.heads
    weights = [norm(model, h)]
    if not model.latent:
        groups = 2 * model.kv_heads * model.head_dim
        weights.append(Weight("attention", h * (heads * model.head_dim + groups)))
        weights.append(Weight("attention", heads * model.head_dim * h))
        if model.bias or model.qkv_bias:
            weights.append(Weight("attention", heads * model.head_dim + groups))
        if model.bias:
            weights.append(whole("attention", h))
        if model.qk_norm:
            weights.append(norm(model, 2 * model.head_dim))
        return weights
    # Down-projections are copied to every TP rank, up-projections are split by head.
    if model.query_lora:
        weights += [
            whole("attention", h * model.query_lora),
            Weight("attention", model.query_lora * heads * model.query_dim),
        ]
        weights += [norm(model, model.query_lora)] if model.qk_norm else []
    else:
        weights.append(Weight("attention", h * heads * model.query_dim))
    weights += [
        whole("attention", h * (model.kv_lora + model.rope)),
        Weight("attention", model.kv_lora * heads * (model.nope + model.value)),
    ]
    weights += [norm(model, model.kv_lora)] if model.qk_norm else []
    proj = heads * model.value * h
    weights.append(whole("attention", proj) if sp_tp_sp else Weight("attention", proj))
    if model.bias:  # latent projections have none
        weights.append(whole("attention", h))
    if selects:
        weights.append(Weight("indexer", index_numbers(model), "whole", averaged=True))
    return weights


def index_numbers(model: Model) -> int:
    """Return the number of parameters of an indexer: query, key and weights projections, and key norm."""
    # DeepSeek-V3.2: 1536 x 64 x 128 + 7168 x (128 + 64) + 2 x 128 = 14.0 M parameters.
    query = (model.query_lora or model.hidden) * model.index_heads * model.index_dim
    return query + model.hidden * (model.index_dim + model.index_heads) + 2 * model.index_dim


def mlp(model: Model, experts: bool) -> list[Weight]:
    """Return the weights of one layer's MLP with its norm."""
    # Gate, up and down projection; without a gate only up and down.
    h, matrices = model.hidden, 3 if model.gated else 2
    weights = [norm(model, h)]
    if not experts:
        weights.append(Weight("dense MLP", matrices * h * model.ffn))
        if model.bias:
            weights += [Weight("dense MLP", (matrices - 1) * model.ffn), whole("dense MLP", h)]
        return weights
    weights.append(whole("router", model.experts * (h + model.bias)))
    of_expert = matrices * h * model.expert_ffn
    if model.bias:
        of_expert += (matrices - 1) * model.expert_ffn + h
    weights.append(Weight("routed experts", model.experts * of_expert, "expert"))
    if model.shared_ffn:
        weights.append(Weight("shared experts", matrices * h * model.shared_ffn))
    return weights


@lru_cache(maxsize=64)
def layer(model: Model, kind: LayerKind, sp_tp_sp: bool = False) -> tuple[Weight, ...]:
    """Return all weights of one transformer layer."""
    return (*attention(model, kind.selects, sp_tp_sp), *mlp(model, kind.experts))


def embedding(model: Model, part: str = "embedding", cut: Cut = "tensor") -> list[Weight]:
    """Return the weights of the word embedding, split by ``cut``, and of learned positions."""
    weights = [Weight(part, model.vocabulary * model.hidden, cut)]
    if model.learned_positions:
        weights.append(Weight(part, model.learned_positions * model.hidden, "whole"))
    return weights


def mtp_layer(model: Model, kind: LayerKind, sp_tp_sp: bool = False) -> list[Weight]:
    """Return the weights of an MTP layer: norms of both inputs, projection, transformer layer, final norm."""
    # Three norms of width hidden, and the projection from the two concatenated inputs to hidden.
    outer = [norm(model, 3 * model.hidden), Weight("MTP", 2 * model.hidden * model.hidden)]
    inner = [
        Weight("MTP", each.numbers, each.cut, each.summed, each.averaged)
        for each in layer(model, kind, sp_tp_sp)
    ]
    return [Weight("MTP", outer[0].numbers, "whole", summed=True), outer[1], *inner]


def model_weights(model: Model) -> list[Weight]:
    """Return the weights of the whole model, without replicas."""
    weights = embedding(model)
    for kind in model.kinds:
        weights += layer(model, kind)
    weights.append(norm(model, model.hidden))
    weights += [] if model.tied else [Weight("output", model.vocabulary * model.hidden)]
    for kind in model.mtp_kinds:
        weights += mtp_layer(model, kind)
    return weights


def rank_weights(job: Job) -> list[list[Weight]]:
    """Return the weights of each pipeline rank."""
    return of_ranks(job.model, job.layout, job.features.sp_tp_sp, job.features.divided_vocabulary)


@lru_cache(maxsize=16)
def of_ranks(model: Model, layout: Layout, whole_proj: bool, divided: bool) -> list[list[Weight]]:
    """Return each pipeline rank's weights.

    Args:
        model: sizes of the model.
        layout: parallel layout.
        whole_proj: whether output projections of attention are not split by TP.
        divided: whether context parallel ranks divide embedding and output weights.
    """
    cut: Cut = "vocabulary" if divided else "tensor"
    held = layouts.chunks(layout, model)
    ranks: list[list[Weight]] = []
    for rank, rank_chunks in enumerate(held):
        weights: list[Weight] = []
        last = rank == layout.end
        if rank == 0:
            weights += embedding(model, cut=cut)
        # The last stage has its own copy of the embedding, for tied outputs and for MTP's inputs.
        if last and layout.pp > 1 and (model.mtp or model.tied):
            weights += embedding(model, "embedding" if model.mtp else "output", cut)
        for chunk in rank_chunks:
            for number in chunk:
                weights += layer(model, model.kinds[number], whole_proj)
        if last:
            weights.append(norm(model, model.hidden))
            if not model.tied:
                weights.append(Weight("output", model.vocabulary * model.hidden, cut))
            for kind in model.mtp_kinds:
                weights += mtp_layer(model, kind, whole_proj)
        ranks.append(weights)
    return ranks


def by_part(weights: Iterable[Weight], layout: Layout | None = None) -> dict[str, float]:
    """Return a dict from part to number of parameters: unsplit, or with ``layout`` on one rank."""
    sums: dict[str, float] = {}
    for weight in weights:
        numbers = weight.numbers if layout is None else weight.on_rank(layout)
        sums[weight.part] = sums.get(weight.part, 0.0) + numbers
    return {part: sums[part] for part in PARTS if part in sums}
