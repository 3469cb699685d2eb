"""Estimate of each pipeline rank's memory: weights, gradients, optimizer state, activations, temporaries."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_dsa.tools.planner import activations, layouts, schedules, sizes, waiting
from mindspeed_dsa.tools.planner.activations import Kept, Layer
from mindspeed_dsa.tools.planner.job import Job, LayerKind, Layout, Model
from mindspeed_dsa.tools.planner.sizes import Weight

GIB = 2**30
BOTH_COPIES = 2
"""Bytes per parameter that ``--reuse-fp32-param`` saves: the bf16 copy."""
WAITING = "waiting weight gradients"
STAGING = 3
"""Buffers in the staging of ``--swap-optimizer``, each for one of its N parts."""


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank, in bytes if not stated otherwise.

    Attributes:
        numbers: dict from part to the number of parameters on the rank.
        buffers: buffers of modules, which are not parameters.
        updated: number of parameters whose optimizer state the rank holds, on the device or the host.
        host_state: optimizer state on the host.
        host: all bytes that features keep in host memory.
        activations: dict from part to bytes at the schedule's peak.
        in_flight: number of microbatches between forward and backward at the peak, by chunk.
        waiting: number of microbatches with deferred weight gradients at the peak, by chunk.
        temporary: dict from kind of temporary tensors to their largest size.
        step: temporary memory of the optimizer step, in which no activations are kept.
        allocator: assumed overhead of the allocator.
        written: bytes that the forwards of one microbatch write, kept or not.
        swapped: bytes of one microbatch that are swapped to the host.
        repeated: bytes of one microbatch that recomputation writes again.
    """

    rank: int
    numbers: dict[str, float]
    weights: float
    buffers: float
    gradients: float
    masters: float
    moments: float
    updated: float
    host_state: float
    host: float
    activations: dict[str, float]
    in_flight: tuple[int, ...]
    waiting: tuple[int, ...]
    temporary: dict[str, float]
    step: float
    allocator: float
    written: float
    swapped: float
    repeated: float

    @property
    def state(self) -> float:
        """Bytes of weights, buffers, gradients and optimizer state, which stay allocated between steps."""
        return self.weights + self.buffers + self.gradients + self.masters + self.moments

    @property
    def kept(self) -> float:
        """Bytes of the activations that are kept for backward when the rank's memory is largest."""
        return sum(self.activations.values())

    @property
    def beside(self) -> float:
        """Largest bytes on top of :attr:`state`, in forward and backward or in the optimizer step."""
        return max(self.kept + sum(self.temporary.values()), self.step)

    @property
    def allocated(self) -> float:
        """Bytes of all tensors when the rank's memory is largest."""
        return self.state + self.beside

    @property
    def total(self) -> float:
        """Bytes of all tensors when the rank's memory is largest, plus the allocator's overhead."""
        return self.allocated + self.allocator


@dataclass(frozen=True)
class Chosen:
    """Memory-saving features that apply to one layer; flags such as ``--...-num-layers`` limit the layers."""

    norm: bool
    act: bool
    swap: float
    """Share of the swappable bytes that is swapped."""


def of_job(job: Job, allocator: float) -> list[RankMemory]:
    """Return the memory of each pipeline rank.

    Args:
        job: planned job.
        allocator: allocator's overhead, as a share of the tensors' bytes.
    """
    weights = _of_weights(
        job.model,
        job.layout,
        job.features.sp_tp_sp,
        job.features.divided_vocabulary,
        (job.shards, job.expert_shards),
        job.features.warmup_stage,
        job.training.grouped,
    )
    held = layouts.chunks(job.layout, job.model)
    kept = _Kinds(job)
    return [_rank(job, rank, weights[rank], held[rank], kept, allocator) for rank in range(job.layout.pp)]


@dataclass(frozen=True)
class _Weights:
    """Parameter counts of one pipeline rank.

    Attributes:
        by_part: dict from part to the number of parameters on the rank.
        all: number of parameters that the rank holds between steps, after sharding.
        dense: number of trained dense parameters held between steps.
        divided: number of these that context parallel ranks have other parts of.
        experts: number of trained parameters of experts held between steps.
        trained: number of all trained parameters before sharding.
        largest: number of elements of the largest matrix.
    """

    by_part: dict[str, float]
    all: float
    dense: float
    experts: float
    divided: float
    trained: float
    largest: float


@lru_cache(maxsize=32)
def _of_weights(
    model: Model,
    layout: Layout,
    whole_proj: bool,
    divided: bool,
    shards: tuple[int, int],
    indexers: bool,
    grouped: bool,
) -> list[_Weights]:
    """Return the parameter counts of each pipeline rank. Cached, because a search repeats them."""
    ranks = []
    for weights in sizes.of_ranks(model, layout, whole_proj, divided):
        trained = [weight for weight in weights if not indexers or weight.part == "indexer"]
        ranks.append(
            _Weights(
                sizes.by_part(weights, layout),
                sum(_held(layout, shards, weights)),
                *_held(layout, shards, trained),
                sum(weight.on_rank(layout) for weight in trained if weight.cut == "vocabulary"),
                sum(weight.on_rank(layout) for weight in trained),
                max((_one_matrix(model, layout, grouped, weight) for weight in weights), default=0.0),
            )
        )
    return ranks


class _Kinds:
    """Cache of activation bytes per layer, by kind of layer and applied features."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.all = {kind: Layer(job, kind).items() for kind in set(job.kinds)}
        self.left: dict[tuple[LayerKind, Chosen], dict[str, float]] = {}
        self.sums: dict[tuple[LayerKind, tuple[str, ...]], float] = {}

    def kept(self, kind: LayerKind, which: Chosen) -> dict[str, float]:
        """Return a dict from part to the bytes that a layer with these features keeps."""
        if (kind, which) not in self.left:
            items = activations.freed(self.all[kind], self.job, which.norm, which.act, which.swap)
            items.append(activations.inputs_of_recomputed(self.job, which.norm, kind.experts))
            if "core_attn" in self.job.training.modules:
                items.append(activations.shared_selection(self.job, kind))
            self.left[kind, which] = activations.by_part(items)
        return self.left[kind, which]

    def whole(self) -> float:
        """Return the bytes of the largest kind of layer's activations, without recomputation and swapping."""
        return max(self.written(kind) for kind in self.all)

    def written(self, kind: LayerKind, *tags: str) -> float:
        """Return the bytes of a layer's activations without recomputation: all, or those with given tags."""
        if (kind, tags) not in self.sums:
            wanted = [item for item in self.all[kind] if not tags or item.tags & set(tags)]
            self.sums[kind, tags] = sum(item.nbytes for item in wanted)
        return self.sums[kind, tags]

    def attention(self, kind: LayerKind) -> float:
        """Return the bytes that a layer's attention keeps."""
        return self.written(kind, "attention")

    def widest_attention(self) -> float:
        """Return the largest bytes that a layer's attention keeps, over all kinds."""
        return max(map(self.attention, self.all))


def _rank(
    job: Job,
    rank: int,
    weights: _Weights,
    held: Sequence[tuple[int, ...]],
    kinds: _Kinds,
    allocator: float,
) -> RankMemory:
    layout, training, features = job.layout, job.training, job.features
    numbers, dense, experts = weights.all, weights.dense, weights.experts
    share = _share(job, weights)
    masters = training.masters * share if training.bf16 else 0.0
    # SGD keeps one momentum instead of two moments.
    moments = training.moments * (1.0 if training.adam else 0.5) * share
    host = 0.0
    if features.swap_optimizer:
        host, masters, moments = masters + moments, 0.0, 0.0
    elif features.virtual:
        # One value for all pipeline ranks, or one for each.
        quota = features.virtual[min(rank, len(features.virtual) - 1)] * GIB
        host = min(quota, moments)
        moments -= host
    if features.reuse and training.bf16:
        masters -= BOTH_COPIES * share
    moe_layers = sum(job.model.pattern[number] for chunk in held for number in chunk)
    # Two fp32 buffers per MoE layer: the experts' bias and the count of tokens per expert.
    buffers = 2 * 4.0 * job.model.experts * moe_layers * job.model.expert_bias
    per_chunk = [_chunk(job, rank, chunk, held, kinds) for chunk in range(layout.vpp)]
    of_forwards = [sum(each.values()) for each in per_chunk]
    operands = [waiting.of_chunk(job, rank, *each) for each in enumerate(held)]
    peak = schedules.peak(job, rank, of_forwards, operands, [len(chunk) for chunk in held])
    kept: dict[str, float] = {}
    for count, parts in zip(peak.open, per_chunk, strict=True):
        for part, nbytes in parts.items():
            kept[part] = kept.get(part, 0.0) + count * nbytes
    if peak.pairs:
        kept["layer of both passes"] = peak.pairs
    if any(peak.waiting):
        kept[WAITING] = sum(map(operator.mul, peak.waiting, operands))
    if messages := _messages(job, rank):
        kept["messages"] = messages
    temporary = _temporary(job, rank, weights, kinds)
    # 3 buffers x (4 + 8) bytes of a parameter, over N parts.
    swapped = STAGING * (training.masters + training.moments) / features.swap_parts * share
    staging = swapped if features.swap_optimizer else 0.0
    weight = (job.sharding and job.sharding.weight) or training.number
    stored = weight * numbers + _in_fp8(job, weights)
    reduced = not (job.sharding and job.sharding.whole)
    gradients = training.grad_number * (dense + experts if reduced else weights.trained)
    state = stored + buffers + gradients + masters + moments
    # Staging buffers are used in the optimizer step, after activations are freed.
    beside = max(sum(kept.values()) + sum(temporary.values()), staging)
    return RankMemory(
        rank=rank,
        numbers=dict(weights.by_part),
        weights=stored,
        buffers=buffers,
        gradients=gradients,
        masters=masters,
        moments=moments,
        updated=share,
        host_state=host,
        host=host + _host_activations(job, rank, held, peak.open, kinds),
        activations=kept,
        in_flight=peak.open,
        waiting=peak.waiting,
        temporary=temporary,
        step=staging,
        allocator=allocator * (state + beside),
        **_traffic(job, rank, held, kinds),
    )


def _in_fp8(job: Job, weights: _Weights) -> float:
    """Return the bytes of weights in fp8, less those of the bf16 weights that they replace."""
    if not job.training.fp8:
        return 0.0
    # Not divided by shards: the copies stay for all microbatches of a step.
    numbers = sum(weights.by_part.get(part, 0.0) for part in sizes.MULTIPLIED)
    # One byte by rows, for forward, and one by columns, for the input's gradient.
    return (2 - job.training.number * job.training.stored) * numbers


def _held(layout: Layout, shards: tuple[int, int], weights: Iterable[Weight]) -> tuple[float, float]:
    """Return the numbers of dense and of expert parameters on a rank after sharding."""
    experts = dense = 0.0
    for weight in weights:
        if weight.cut == "expert":
            experts += weight.on_rank(layout) / shards[1]
        else:
            dense += weight.on_rank(layout) / shards[0]
    return dense, experts


def _traffic(job: Job, rank: int, held: Sequence[tuple[int, ...]], kinds: _Kinds) -> dict[str, float]:
    """Return the bytes that a rank's layers write, swap and recompute for one microbatch."""
    traffic = {"written": 0.0, "swapped": 0.0, "repeated": 0.0}
    choice = chosen_layers(job, rank, held)
    for chunk, layers in enumerate(held):
        for place, number in enumerate(layers):
            kind, which = job.kinds[number], choice[chunk, place]
            traffic["written"] += kinds.written(kind)
            if _is_full(job, place):
                traffic["repeated"] += kinds.written(kind)
                continue
            traffic["swapped"] += kinds.attention(kind) * which.swap
            tags = ("norm",) * which.norm + ("act",) * which.act + job.training.modules
            traffic["repeated"] += kinds.written(kind, *tags) if tags else 0.0
    return traffic


def _share(job: Job, weights: _Weights) -> float:
    """Return the number of parameters for which a rank holds optimizer state."""
    layout, dense, experts = job.layout, weights.dense, weights.experts
    # The distributed optimizer divides its state over all ranks with the same weights.
    if not job.training.distributed:
        return dense + experts
    copied = (dense - weights.divided) / layout.replicas
    return copied + weights.divided / layout.dp + experts / layout.expert_replicas


def chosen_layers(job: Job, rank: int, held: Sequence[tuple[int, ...]]) -> dict[tuple[int, int], Chosen]:
    """Return a dict from ``(chunk, index in the chunk)`` to the features that apply to this layer."""
    features, full = job.features, job.training.full
    # --...-num-layers takes the first layer of every chunk, then the second of every chunk, and so on.
    places = sorted(
        ((chunk, place) for chunk, layers in enumerate(held) for place in range(len(layers))),
        key=lambda each: (each[1], each[0]),
    )
    # Fully recomputed layers have nothing left for the features; with full = -1 that is every layer.
    partial = [position for position in places if position[1] >= full >= 0]

    def first(on: bool, count: int | None) -> set[tuple[int, int]]:
        return set(partial if count is None else partial[:count]) if on else set()

    norm = first(features.recompute_norm, features.norm_layers)
    act = first(features.recompute_act, features.act_layers)
    swap = first(features.swap_attention, features.swap_layers)
    share = features.swap_shares[rank] if features.swap_shares else 1.0
    return {
        position: Chosen(position in norm, position in act, share * (position in swap)) for position in places
    }


def _is_full(job: Job, place: int) -> bool:
    return job.training.full < 0 or place < job.training.full


def _chunk(
    job: Job, rank: int, chunk: int, held: Sequence[tuple[int, ...]], kinds: _Kinds
) -> dict[str, float]:
    """Return a dict from part to the bytes that a forward of one chunk and microbatch keeps."""
    model, layout, training = job.model, job.layout, job.training
    rows = job.tokens / (layout.tp if layout.sequence else 1)
    stream = rows * model.hidden * training.number
    items: list[Kept] = []
    sums: dict[str, float] = {}
    choice = chosen_layers(job, rank, held)
    for place, number in enumerate(held[chunk]):
        if _is_full(job, place):
            # Only the input of each recomputed group of layers stays.
            first = training.full >= 0 or place % training.full_group == 0
            items += [Kept("recomputed layers", stream)] if first else []
            items.append(activations.shared_selection(job, job.kinds[number]))
            continue
        for part, nbytes in kinds.kept(job.kinds[number], choice[chunk, place]).items():
            sums[part] = sums.get(part, 0.0) + nbytes
    is_first = rank == 0 and chunk == 0
    if is_first:
        # Token ids are int64; there is also a one-byte mask of ids in other ranks' vocabulary.
        mask = rows * model.hidden * training.dropout
        ranks = job.vocabulary_ranks
        ids = ranks * job.tokens * (8.0 + (layout.tp * ranks > 1))
        items.append(Kept("embedding", ids + mask))
    elif _copies_its_input(job, bool(held[chunk]) and _is_full(job, 0)):
        items.append(Kept("received", stream))
    if layout.ends(rank, chunk):
        items += _end(job)
    for part, nbytes in activations.by_part(items).items():
        sums[part] = sums.get(part, 0.0) + nbytes
    return sums


def _messages(job: Job, rank: int) -> float:
    """Return the bytes of point-to-point buffers: an output being sent, and the next input."""
    layout = job.layout
    rows = job.tokens / (layout.tp if layout.sequence else 1)
    count = (rank > 0 or layout.vpp > 1) + (rank < layout.pp - 1 or layout.vpp > 1)
    return count * rows * job.model.hidden * job.training.number * (layout.pp > 1)


def _copies_its_input(job: Job, full: bool) -> bool:
    """Return whether a stage keeps its received input in addition to the copies that its first norm keeps."""
    recomputed = job.features.recompute_norm or "layernorm" in job.training.modules
    return job.training.bf16 and not (job.training.kernels or full or recomputed)


def _end(job: Job) -> list[Kept]:
    """Return the activations of final norm, output layer, loss and multi-token prediction."""
    model, layout, training = job.model, job.layout, job.training
    rows = job.tokens / (layout.tp if layout.sequence else 1)
    stream = rows * model.hidden * training.number
    # The loss of a divided vocabulary keeps its gathered input instead.
    loss = activations.of_loss(job) + stream * (job.vocabulary_ranks == 1)
    items = [*activations.norm_items(job, model.hidden, rows), Kept("output", loss)]
    for kind in job.mtp_kinds:
        inner = Layer(job, kind).items()
        inner += activations.norm_items(job, 3 * model.hidden, rows)
        inner += [Kept("MTP", 2 * stream), Kept("MTP", loss), Kept("MTP", job.tokens * 8.0)]
        items += [Kept("MTP", each.nbytes) for each in inner]
    return items


def _host_activations(
    job: Job, rank: int, held: Sequence[tuple[int, ...]], flights: Iterable[int], kinds: _Kinds
) -> float:
    """Return the host bytes of swapped attention activations, for all microbatches in flight."""
    nbytes = 0.0
    choice = chosen_layers(job, rank, held)
    for chunk, count in enumerate(flights):
        nbytes += count * sum(
            kinds.attention(job.kinds[number]) * choice[chunk, place].swap
            for place, number in enumerate(held[chunk])
        )
    return nbytes


def _temporary(job: Job, rank: int, weights: _Weights, kinds: _Kinds) -> dict[str, float]:
    """Return a dict from kind to the largest temporary tensors of a forward or backward."""
    model, layout, training = job.model, job.layout, job.training
    number, tokens = training.number, job.tokens
    rows = tokens / (layout.tp if layout.sequence else 1)
    sizes: dict[str, float] = {}
    widest = model.ffn / layout.tp * tokens
    if model.experts:
        received = rows * model.router_topk * layout.etp * job.skew
        widest = max(widest, received * model.expert_ffn / layout.etp)
        sizes["dispatched tokens"] = 2 * received * model.hidden * number
    sizes["gradients of an MLP"] = (3 if model.gated else 2) * widest * number
    if rank == layout.end:
        sizes["logits"] = activations.logits_at_once(job)
    if job.vocabulary_ranks > 1 and rank in (0, layout.end):
        # Embeddings of all ranks' tokens with and without those found elsewhere; gradients of hidden states.
        sizes["rows of all context parallel ranks"] = (
            2 * job.vocabulary_ranks * tokens * model.hidden * number
        )
    sizes["gradient of a weight"] = weights.largest * number
    if job.sharding and (job.shards > 1 or job.casts):
        # The layer that computes and the prefetched ones; pairs compute two directions at a time.
        unit = max(_units(job, rank))
        directions = 2 if job.features.pairs else 1
        gathered = directions * (1 + job.sharding.prefetch) * unit
        if job.sharding.stays or job.sharding.whole:
            gathered = sum(weights.by_part.values())
        sizes["gathered layers"] = gathered * number
        sizes["gradients of a layer"] = unit * (number + training.grad_number)
    if training.full:
        group = training.full_group if training.full < 0 else 1
        sizes["recomputed layer"] = kinds.whole() * group
    if job.features.swap_attention:
        sizes["attention of two layers"] = 2 * kinds.widest_attention()
    if model.sparse and not (job.features.indexer and job.features.attention):
        # Two fp32 matrices [tokens, sequence] per head: as stock DSA computes them.
        heads = max(model.index_heads, math.ceil(model.heads / layout.tp))
        sizes["matrices of stock DSA"] = 2.0 * 4 * tokens * job.sequence * heads
    return sizes


def _units(job: Job, rank: int) -> list[float]:
    """Return the parameter count of each FSDP unit: a layer, the embedding or the output layer."""
    model, layout = job.model, job.layout
    whole = () if job.expert_shards > 1 or job.casts else ("expert",)
    units = [
        sum(each.on_rank(layout) for each in sizes.layer(model, kind) if each.cut not in whole)
        for kind in set(model.kinds)
    ]
    if rank in (0, layout.end):
        units.append(model.vocabulary * model.hidden / layout.tp)
    return units


def _one_matrix(model: Model, layout: Layout, grouped: bool, weight: Weight) -> float:
    """Return the size of a weight's largest matrix; a rank's grouped experts form one matrix."""
    numbers = weight.on_rank(layout)
    if weight.cut != "expert":
        return numbers
    # The first matrix of a gated MLP has two thirds of its numbers, 1 / 1.5.
    matrices = 1.5 if model.gated else 2.0
    local = 1.0 if grouped else model.experts / layout.ep
    return numbers / matrices / local
