"""Estimate of floating point operations and of moved bytes, by part; a multiply-add counts as two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """FLOPs and bytes of one part of the model for one microbatch.

    Attributes:
        forward: FLOPs of a forward.
        backward: FLOPs of a backward.
        kind: name of the :class:`Device` rate that applies: ``matmul``, ``attention`` or ``sparse``. The
            bytes of ``sparse`` work are read while it computes. Other bytes take time of their own.
        moved: bytes that a forward reads and writes.
        moved_back: bytes that a backward reads and writes.
        weights: FLOPs of the backward's weight gradients that a split backward defers.
        moved_weights: bytes of these weight gradients; part of ``moved_back``.
        modules: values of ``--recompute-modules`` that repeat the forward in backward.
    """

    part: str
    forward: float
    backward: float
    kind: str = "matmul"
    moved: float = 0.0
    moved_back: float = 0.0
    weights: float = 0.0
    moved_weights: float = 0.0
    modules: tuple[str, ...] = ()

    def times(self, factor: float, part: str = "") -> Work:
        """Return a copy with all numbers multiplied by ``factor``, and with the name ``part`` if given."""
        return replace(
            self,
            part=part or self.part,
            forward=self.forward * factor,
            backward=self.backward * factor,
            moved=self.moved * factor,
            moved_back=self.moved_back * factor,
            weights=self.weights * factor,
            moved_weights=self.moved_weights * factor,
        )


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
    # A backward also reads the selected keys, and writes gradients of the same size.
    moved = pairs * width * number
    return Work("attention", forward * pairs, backward * pairs, "sparse", moved, 2 * moved)


def index_scores(model: Model, length: int, backward: bool) -> Work:
    """Return the FLOPs of the indexer's scores for one sequence.

    Forward scores all visible pairs. Backward has three products per selected pair, and the KL loss
    multiplies queries with selected keys once more in all heads of the main attention.
    """
    pair = 2.0 * model.index_heads * model.index_dim
    chosen = selected_pairs(length, model.topk)
    back = 3 * pair * chosen + 2.0 * model.heads * (model.kv_lora + model.rope) * chosen
    return Work("indexer", pair * visible_pairs(length), back if backward else 0.0, "sparse")


Products = Sequence[tuple[float, float]]
"""Input and output width of matrix products."""


def projections(model: Model, tp: int, whole_proj: bool = False) -> dict[str, Products]:
    """Return attention's products on one rank: over all tokens, up from latents, and over the rank's rows."""
    heads, hidden = model.heads / tp, model.hidden
    out = (heads * model.value_dim, float(hidden))
    if not model.latent:
        query = (heads + 2 * model.kv_heads / tp) * model.head_dim
        return {"all": [(hidden, query), out], "up": [], "rows": []}
    up = [(float(model.kv_lora), heads * (model.nope + model.value))]
    every, rows = [], [(float(hidden), float(model.kv_lora + model.rope))]
    query = heads * model.query_dim
    if model.query_lora:
        rows.append((float(hidden), float(model.query_lora)))
        up.append((float(model.query_lora), query))
    else:
        every.append((float(hidden), query))
    if whole_proj:
        rows.append((out[0] * tp, out[1]))
    else:
        every.append(out)
    return {"all": every, "up": up, "rows": rows}


def mlp(model: Model, width: float) -> Products:
    """Return the products of an MLP: up, with a gate twice as wide, and down."""
    return [(model.hidden, (2 if model.gated else 1) * width), (width, model.hidden)]


def linear(
    job: Job,
    part: str,
    products: Products,
    of: float,
    copies: float = 1.0,
    apart: bool = True,
    modules: tuple[str, ...] = (),
) -> Work:
    """Return the FLOPs and bytes of matrix products.

    Args:
        job: planned job.
        part: part of the model.
        products: input and output widths.
        of: number of rows.
        copies: number of weights of each product, over which the rows are divided.
        apart: whether a split backward defers the weight gradients.
        modules: values of ``--recompute-modules``, as in :class:`Work`.
    """
    training = job.training
    numbers = sum(above * below for above, below in products)
    weights, rows = copies * numbers * training.number, of * sum(map(sum, products)) * training.number
    # Rows, weight and output of M K N; backward: the same for the input's gradient, then both rows for the
    # weight's gradient, which is read and written.
    gradient = rows + 2 * copies * numbers * training.grad_number
    return Work(
        part,
        2.0 * numbers * of,
        4.0 * numbers * of,
        moved=weights + rows,
        moved_back=weights + rows + gradient,
        weights=2.0 * numbers * of if apart else 0.0,
        moved_weights=gradient if apart else 0.0,
        modules=modules,
    )


PERMUTED = (3, 6)
"""Times that permutation and un-permutation move an expert token, in forward and backward."""
LOGIT_BYTES = (4, 8)
"""Bytes that the loss moves for a logit, in forward and backward, without the product's output."""


def layer(job: Job, kind: LayerKind) -> list[Work]:
    """Return one :class:`Work` for each part of a layer, for one microbatch on one rank."""
    model, layout, training, features = job.model, job.layout, job.training, job.features
    tokens, tp = job.tokens, layout.tp
    rows = tokens / (tp if layout.sequence else 1)
    products = projections(model, tp, features.sp_tp_sp)
    items = [
        linear(job, "projections", products["all"], tokens),
        linear(job, "projections", products["up"], tokens, modules=("mla_up_proj",)),
        linear(job, "projections", products["rows"], rows),
    ]
    # Every CP rank has the same share of all pairs.
    share = training.micro / layout.cp
    sparse = model.sparse and features.attention
    core = attention_core(model, job.sequence, job.absorbed, sparse, training.number)
    if model.sparse and not sparse:  # stock DSA computes the full square, not only the causal half
        core = core.times(2.0)
    index_work: list[Work] = []
    if kind.selects and (model.index_loss or job.sequence > model.topk):
        # Inputs are detached, so backward only computes weight gradients. Each TP rank runs the full indexer.
        forward_flops = 2.0 * sizes.index_numbers(model) * tokens
        learned = forward_flops if model.index_loss else 0.0
        index_work.append(Work("indexer", forward_flops, learned, weights=learned))
        # Stock DSA scores the full square, the fused indexer only the causal half.
        scores = index_scores(model, job.sequence, model.index_loss)
        index_work.append(scores.times(share * (1.0 if features.indexer else 2.0)))
    items += [replace(each, modules=("core_attn",)) for each in (core.times(share / tp), *index_work)]
    if not kind.experts:
        return [*items, linear(job, "dense MLP", mlp(model, model.ffn / tp), tokens, modules=("mlp",))]
    received = rows * model.router_topk * layout.etp * kind.skew
    wide = mlp(model, model.expert_ffn / layout.etp)
    experts_work = linear(job, "routed experts", wide, received, model.experts / layout.ep)
    if features.alltoall_overlap:
        experts_work = replace(experts_work, weights=0.0, moved_weights=0.0)
    permuted = received / layout.etp * model.hidden * training.number
    items += [
        linear(job, "router", [(model.hidden, model.experts)], rows, apart=False, modules=("moe",)),
        replace(experts_work, modules=("moe",)),
        Work(
            "permutation",
            0.0,
            0.0,
            moved=PERMUTED[0] * permuted,
            moved_back=PERMUTED[1] * permuted,
            modules=("moe",),
        ),
    ]
    if model.shared_ffn:
        shared = mlp(model, model.shared_ffn / tp)
        items.append(linear(job, "shared experts", shared, tokens, modules=("moe", "shared_experts")))
    return items


def chunk(job: Job, rank: int, number: int) -> list[Work]:
    """Return the work of one chunk of a pipeline rank for one microbatch, without recomputation."""
    model, layout = job.model, job.layout
    held = layouts.chunks(layout, model)[rank][number]
    items: list[Work] = []
    for kind, count in Counter(job.kinds[number] for number in held).items():
        items += [part.times(count) for part in layer(job, kind)]
    return [*items, *end(job)] if layout.ends(rank, number) else items


def end(job: Job) -> list[Work]:
    """Return the work of output layer, loss and multi-token prediction for one microbatch."""
    model, layout = job.model, job.layout
    output = _output(job)
    items = list(output)
    for kind in job.mtp_kinds:
        items += [part.times(1, "MTP") for part in layer(job, kind)]
        joined = [(2.0 * model.hidden, model.hidden / layout.tp)]
        items += [linear(job, "MTP", joined, job.tokens), *(part.times(1, "MTP") for part in output)]
    return items


def _output(job: Job) -> list[Work]:
    model, layout, features = job.model, job.layout, job.features
    product = linear(job, "output", [(model.hidden, model.vocabulary / layout.tp)], job.tokens)
    if features.chunked_loss:
        # If the chunked loss forms its gradients in backward, it computes the logits again there.
        backward = product.backward + (0.0 if activations.in_forward(job) else product.forward)
        product = replace(product, backward=backward, weights=0.0, moved_weights=0.0)
    moved, moved_back = (each * job.tokens * model.vocabulary / layout.tp for each in LOGIT_BYTES)
    return [product, Work("loss", 0.0, 0.0, moved=moved, moved_back=moved_back)]


def repeated(job: Job, rank: int, number: int) -> list[Work]:
    """Return the work that recomputation repeats in the backward of a chunk; only its forward counts."""
    model, layout, training = job.model, job.layout, job.training
    held = layouts.chunks(layout, model)[rank][number]
    whole = held if training.full < 0 else held[: training.full]
    items: list[Work] = []
    for kind, count in Counter(job.kinds[number] for number in whole).items():
        items += [part.times(count) for part in layer(job, kind)]
    kinds = Counter(job.kinds[number] for number in held[len(whole) :])
    if layout.ends(rank, number):
        kinds.update(job.mtp_kinds)
        if training.full < 0:
            items += [part for kind in job.mtp_kinds for part in layer(job, kind)]
    for kind, count in kinds.items() if training.modules else ():
        items += [part.times(count) for part in layer(job, kind) if {*part.modules} & {*training.modules}]
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
