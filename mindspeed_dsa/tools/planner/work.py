"""Estimate of floating point operations, by part of the model; a multiply-add counts as two."""

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
    """FLOPs of one part of the model for one microbatch.

    Attributes:
        forward: FLOPs of a forward.
        backward: FLOPs of a backward.
        kind: name of the :class:`Device` rate that applies: ``matmul``, ``attention`` or ``sparse``.
        moved: bytes that a forward must read, if memory may be the bottleneck. A backward also reads them,
            and writes gradients of the same size.
        weights: FLOPs of the backward's weight gradients that a split backward defers.
    """

    part: str
    forward: float
    backward: float
    kind: str = "matmul"
    moved: float = 0.0
    weights: float = 0.0

    def times(self, factor: float, part: str = "") -> Work:
        """Return a copy with all numbers multiplied by ``factor``, and with the name ``part`` if given."""
        numbers = (self.forward * factor, self.backward * factor)
        rest = (self.moved * factor, self.weights * factor)
        return Work(part or self.part, *numbers, self.kind, *rest)


def visible_pairs(length: int) -> float:
    """Return the number of (query, key) pairs under a causal mask."""
    return length * (length + 1) / 2


def selected_pairs(length: int, topk: int) -> float:
    """Return the number of (query, key) pairs under a causal mask with at most ``topk`` keys per query."""
    if length <= topk:
        return visible_pairs(length)
    # Query i < topk sees i keys: length 4096, topk 2048: 2048 x 4096 - 2048 x 2047 / 2 = 6.3 M pairs.
    return topk * length - topk * (topk - 1) / 2


def pair_flops(model: Model, absorbed: bool) -> tuple[float, float]:
    """Return the forward and the backward FLOPs of one (query, key) pair, summed over all heads.

    Forward multiplies with key and value. Backward recomputes scores: three products with the key, two with
    the value.
    """
    # 128 heads, forward: absorbed 2 x 128 x (576 + 512) = 279 kFLOP a pair, naive 2 x 128 x (192 + 128) = 82.
    key = model.kv_lora + model.rope if absorbed else model.query_dim
    value = model.kv_lora if absorbed else model.value_dim
    return 2.0 * model.heads * (key + value), 2.0 * model.heads * (3 * key + 2 * value)


def attention_core(model: Model, length: int, absorbed: bool, sparse: bool, number: int = 2) -> Work:
    """Return the FLOPs of attention for one sequence, over all heads.

    In naive form each query reads keys and values per head, in absorbed form one latent for all heads.
    """
    pairs = selected_pairs(length, model.topk) if sparse else visible_pairs(length)
    forward, backward = pair_flops(model, absorbed)
    if not sparse or length <= model.topk:
        return Work("attention", forward * pairs, backward * pairs, "attention")
    width = model.kv_lora + model.rope if absorbed else model.heads * (model.query_dim + model.value_dim)
    return Work("attention", forward * pairs, backward * pairs, "sparse", pairs * width * number)


def index_scores(model: Model, length: int, backward: bool) -> Work:
    """Return the FLOPs of the indexer's scores for one sequence.

    Forward scores all visible pairs. Backward has three products per selected pair, and the KL loss
    multiplies queries with selected keys once more in all heads of the main attention.
    """
    pair = 2.0 * model.index_heads * model.index_dim
    chosen = selected_pairs(length, model.topk)
    back = 3 * pair * chosen + 2.0 * model.heads * (model.kv_lora + model.rope) * chosen
    return Work("indexer", pair * visible_pairs(length), back if backward else 0.0, "sparse")


def layer(job: Job, kind: LayerKind) -> list[Work]:
    """Return one :class:`Work` for each part of a layer, for one microbatch on one rank."""
    model, layout, training, features = job.model, job.layout, job.training, job.features
    tokens, tp = job.tokens, layout.tp
    rows = tokens / (tp if layout.sequence else 1)

    def linear(part: str, numbers: float, of: float, apart: bool = True) -> Work:
        forward = 2.0 * numbers * of
        return Work(part, forward, 2 * forward, weights=forward if apart else 0.0)

    weights = sizes.attention(model, kind.selects, features.sp_tp_sp)
    cut = sum(w.numbers for w in weights if w.part == "attention" and w.cut == "tensor") / tp
    copied = sum(w.numbers for w in weights if w.part == "attention" and w.cut == "whole")
    items = [linear("projections", cut, tokens), linear("projections", copied, rows)]
    # Every CP rank has the same share of all pairs.
    share = training.micro / layout.cp
    sparse = model.sparse and features.attention
    core = attention_core(model, job.sequence, job.absorbed, sparse, training.number)
    if model.sparse and not sparse:  # stock DSA computes the full square, not only the causal half
        core = core.times(2.0)
    items.append(core.times(share / tp))
    if kind.selects and (model.index_loss or job.sequence > model.topk):
        # Inputs are detached, so backward only computes weight gradients. Each TP rank runs the full indexer.
        forward_flops = 2.0 * sizes.index_numbers(model) * tokens
        learned = forward_flops if model.index_loss else 0.0
        items.append(Work("indexer", forward_flops, learned, weights=learned))
        # Stock DSA scores the full square, the fused indexer only the causal half.
        scores = index_scores(model, job.sequence, model.index_loss)
        items.append(scores.times(share * (1.0 if features.indexer else 2.0)))
    matrices = 3 if model.gated else 2
    if not kind.experts:
        return [*items, linear("dense MLP", matrices * model.hidden * model.ffn / tp, tokens)]
    received = rows * model.router_topk * job.imbalance
    items += [
        linear("router", model.experts * model.hidden, rows, apart=False),
        linear(
            "routed experts",
            matrices * model.hidden * model.expert_ffn,
            received,
            apart=not features.alltoall_overlap,
        ),
    ]
    if model.shared_ffn:
        items.append(linear("shared experts", matrices * model.hidden * model.shared_ffn / tp, tokens))
    return items


def chunk(job: Job, rank: int, number: int) -> list[Work]:
    """Return the FLOPs of one chunk of a pipeline rank for one microbatch, without recomputation."""
    model, layout = job.model, job.layout
    held = layouts.chunks(layout, model)[rank][number]
    items: list[Work] = []
    for kind, count in Counter(model.kinds[number] for number in held).items():
        items += [part.times(count) for part in layer(job, kind)]
    if layout.ends(rank, number):
        logits = 2.0 * model.vocabulary * model.hidden / layout.tp * job.tokens
        # If the chunked loss forms its gradients in backward, it computes the logits again there.
        backward = (3 if job.features.chunked_loss and not activations.in_forward(job) else 2) * logits
        output = Work("output", logits, backward, weights=0.0 if job.features.chunked_loss else logits)
        items.append(output)
        for kind in model.mtp_kinds:
            items += [part.times(1, "MTP") for part in layer(job, kind)]
            joined = 2.0 * 2 * model.hidden * model.hidden / layout.tp * job.tokens
            items += [Work("MTP", joined, 2 * joined, weights=joined), output.times(1, "MTP")]
    return items


def model_flops(job: Job) -> dict[str, float]:
    """Return a dict from part to the model's FLOPs, forward and backward of one sequence.

    Recomputation and expert imbalance are not counted. Attention counts in its cheapest form: naive, and for
    sparse attention only the selected pairs.
    """
    model, length = job.model, job.training.sequence
    sums = dict.fromkeys(PARTS, 0.0)
    matrices = 3 if model.gated else 2

    def add(part: str, forward: float, factor: float = 3.0) -> None:
        sums[part] += forward * factor

    for kind in (*model.kinds, *model.mtp_kinds):
        weights = [w for w in sizes.attention(model, kind.selects) if w.part == "attention"]
        add("projections", 2.0 * sum(w.numbers for w in weights) * length)
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
    return {part: flops for part, flops in sums.items() if flops}


def utilisation(job: Job, tokens_per_second: float, tflops: float) -> float:
    """Return the model FLOPs utilisation (MFU): the model's FLOPs per second over the devices' peak.

    Args:
        job: planned job.
        tokens_per_second: rate of the whole job.
        tflops: peak TFLOP/s of one device.
    """
    per_token = sum(model_flops(job).values()) / job.training.sequence
    return per_token * tokens_per_second / (tflops * 1e12 * job.layout.devices)
