"""Floating point operations, two to a multiplication and addition, by part."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mindspeed_dsa.tools.planner import activations, layouts, sizes
from mindspeed_dsa.tools.planner.job import Job, LayerKind, Model

PARTS = (
    "projections",
    "attention",
    "indexer",
    "dense MLP",
    "routed experts",
    "shared experts",
    "router",
    "output",
    "MTP",
)


@dataclass(frozen=True)
class Work:
    """Operations of one microbatch.

    Attributes:
        forward: of a forward.
        backward: of its backward.
        kind: whose rate holds: ``matmul``, ``attention`` or ``sparse``.
        moved: bytes of a forward that it cannot do without, where they may take longer; a backward moves them
            once more and adds as many gradients.
        weights: of the backward, for weights whose gradients a split one leaves for later.
    """

    part: str
    forward: float
    backward: float
    kind: str = "matmul"
    moved: float = 0.0
    weights: float = 0.0

    def times(self, factor: float, part: str = "") -> Work:
        """So often, as another part if one is named."""
        numbers = (self.forward * factor, self.backward * factor)
        rest = (self.moved * factor, self.weights * factor)
        return Work(part or self.part, *numbers, self.kind, *rest)


def visible_pairs(length: int) -> float:
    """Count the pairs of queries and keys under a causal mask."""
    return length * (length + 1) / 2


def selected_pairs(length: int, topk: int) -> float:
    """Count the pairs with at most ``topk`` keys a query."""
    if length <= topk:
        return visible_pairs(length)
    return topk * length - topk * (topk - 1) / 2


def pair_flops(model: Model, absorbed: bool) -> tuple[float, float]:
    """Forward and backward of one pair in all heads: products with the key, and with the value.

    The backward computes scores again: three products with the key, two with the value.
    """
    key = model.kv_lora + model.rope if absorbed else model.query_dim
    value = model.kv_lora if absorbed else model.value_dim
    return 2.0 * model.heads * (key + value), 2.0 * model.heads * (3 * key + 2 * value)


def attention_core(model: Model, length: int, absorbed: bool, sparse: bool, number: int = 2) -> Work:
    """Count the work of one sequence's attention, all heads.

    In naive form a query gathers the keys and values of each head for itself, in absorbed form a latent for
    all heads.
    """
    pairs = selected_pairs(length, model.topk) if sparse else visible_pairs(length)
    forward, backward = pair_flops(model, absorbed)
    if not sparse or length <= model.topk:
        return Work("attention", forward * pairs, backward * pairs, "attention")
    width = model.kv_lora + model.rope if absorbed else model.heads * (model.query_dim + model.value_dim)
    return Work("attention", forward * pairs, backward * pairs, "sparse", pairs * width * number)


def index_scores(model: Model, length: int, backward: bool) -> Work:
    """Count one sequence's index scores: visible pairs forward, three products a selected pair backward.

    The loss also multiplies queries with selected keys once more, in all heads of the main attention.
    """
    pair = 2.0 * model.index_heads * model.index_dim
    chosen = selected_pairs(length, model.topk)
    back = 3 * pair * chosen + 2.0 * model.heads * (model.kv_lora + model.rope) * chosen
    return Work("indexer", pair * visible_pairs(length), back if backward else 0.0, "sparse")


def layer(job: Job, kind: LayerKind) -> list[Work]:
    """Count the work of a layer and microbatch, on one rank."""
    model, layout, training, features = job.model, job.layout, job.training, job.features
    tokens, tp = job.tokens, layout.tp
    rows = tokens / (tp if layout.sequence else 1)

    def linear(part: str, numbers: float, of: float, apart: bool = True) -> Work:
        forward = 2.0 * numbers * of
        return Work(part, forward, 2 * forward, weights=forward if apart else 0.0)

    weights = sizes.attention(model, kind.selects, features.sp_tp_sp)
    cut = sum(w.numbers for w in weights if w.part == "attention" and w.cut == "tensor") / tp
    copied = sum(w.numbers for w in weights if w.part == "attention" and w.cut == "whole")
    found = [linear("projections", cut, tokens), linear("projections", copied, rows)]
    share = training.micro / layout.cp
    sparse = model.sparse and features.attention
    core = attention_core(model, job.sequence, job.absorbed, sparse, training.number)
    if model.sparse and not sparse:  # Megatron's own form multiplies the whole square
        core = core.times(2.0)
    found.append(core.times(share / tp))
    if kind.selects and (model.index_loss or job.sequence > model.topk):
        # Inputs are detached, so only the weights have gradients; every tensor parallel rank does it all.
        own = 2.0 * sizes.index_numbers(model) * tokens
        learned = own if model.index_loss else 0.0
        found.append(Work("indexer", own, learned, weights=learned))
        scores = index_scores(model, job.sequence, model.index_loss)
        found.append(scores.times(share * (1.0 if features.indexer else 2.0)))
    matrices = 3 if model.gated else 2
    if not kind.experts:
        return [*found, linear("dense MLP", matrices * model.hidden * model.ffn / tp, tokens)]
    received = rows * model.router_topk * job.imbalance
    found += [
        linear("router", model.experts * model.hidden, rows, apart=False),
        linear(
            "routed experts",
            matrices * model.hidden * model.expert_ffn,
            received,
            apart=not features.alltoall_overlap,
        ),
    ]
    if model.shared_ffn:
        found.append(linear("shared experts", matrices * model.hidden * model.shared_ffn / tp, tokens))
    return found


def chunk(job: Job, rank: int, number: int) -> list[Work]:
    """Count the work of one chunk of a pipeline rank and one microbatch, without what is recomputed."""
    model, layout = job.model, job.layout
    held = layouts.chunks(layout, model)[rank][number]
    found: list[Work] = []
    for kind, count in Counter(model.kinds[number] for number in held).items():
        found += [each.times(count) for each in layer(job, kind)]
    if layout.ends(rank, number):
        logits = 2.0 * model.vocabulary * model.hidden / layout.tp * job.tokens
        # Where the gradient of the weight waits for backward, so does that of its input, and logits are made
        # again.
        backward = (3 if job.features.chunked_loss and not activations.in_forward(job) else 2) * logits
        output = Work("output", logits, backward, weights=0.0 if job.features.chunked_loss else logits)
        found.append(output)
        for kind in model.mtp_kinds:
            found += [each.times(1, "MTP") for each in layer(job, kind)]
            joined = 2.0 * 2 * model.hidden * model.hidden / layout.tp * job.tokens
            found += [Work("MTP", joined, 2 * joined, weights=joined), output.times(1, "MTP")]
    return found


def model_flops(job: Job) -> dict[str, float]:
    """By part, forward and backward of one sequence as the model defines it: nothing twice, no imbalance.

    Attention counts in the form that takes least: naive, and selected pairs alone where it is sparse.
    """
    model, length = job.model, job.training.sequence
    found = dict.fromkeys(PARTS, 0.0)
    matrices = 3 if model.gated else 2

    def add(part: str, forward: float, factor: float = 3.0) -> None:
        found[part] += forward * factor

    for kind in (*model.kinds, *model.mtp_kinds):
        own = [w for w in sizes.attention(model, kind.selects) if w.part == "attention"]
        add("projections", 2.0 * sum(w.numbers for w in own) * length)
        core = attention_core(model, length, absorbed=False, sparse=model.sparse)
        add("attention", core.forward)
        if kind.selects:
            trained = model.index_loss
            add("indexer", 2.0 * sizes.index_numbers(model) * length, 2.0 if trained else 1.0)
            scores = index_scores(model, length, trained)
            add("indexer", scores.forward, 1.0)
            add("indexer", scores.backward, 1.0)
        if kind.experts:
            add("router", 2.0 * model.experts * model.hidden * length)
            active = model.router_topk * model.expert_ffn
            add("routed experts", 2.0 * matrices * model.hidden * active * length)
            add("shared experts", 2.0 * matrices * model.hidden * model.shared_ffn * length)
        else:
            add("dense MLP", 2.0 * matrices * model.hidden * model.ffn * length)
    add("output", 2.0 * model.vocabulary * model.hidden * length * (1 + model.mtp))
    add("MTP", 2.0 * 2 * model.hidden * model.hidden * length * model.mtp)
    return {part: flops for part, flops in found.items() if flops}


def utilisation(job: Job, tokens_per_second: float, tflops: float) -> float:
    """Model operations over what the devices could do in the same time.

    Args:
        job: planned.
        tokens_per_second: of the whole job.
        tflops: of one device.
    """
    per_token = sum(model_flops(job).values()) / job.training.sequence
    return per_token * tokens_per_second / (tflops * 1e12 * job.layout.devices)
