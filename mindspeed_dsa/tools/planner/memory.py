"""Bytes on a device: weights, gradients, optimizer, activations at the schedule's peak, temporaries."""

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
MASTER, MOMENTS, BOTH_COPIES = 4, 8, 2
"""Bytes of a parameter in the optimizer, and of the copy that ``--reuse-fp32-param`` saves."""
WAITING = "waiting weight gradients"
STAGING = 36
"""Of ``--swap-optimizer``: three buffers of 12 / N bytes a parameter."""


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank, in bytes unless said otherwise.

    Attributes:
        numbers: parameters by part, on the rank.
        buffers: of modules, which are not parameters.
        updated: parameters whose optimizer state the rank has, on the device or the host.
        host_state: of the optimizer, on the host.
        host: all that features move there.
        activations: by part, at the schedule's peak.
        in_flight: open forwards of each chunk then.
        waiting: backwards of each chunk whose weight gradients wait then.
        temporary: the largest of each kind, beside activations.
        step: beside the optimizer, when activations are gone.
        allocator: assumed.
        written: of a microbatch, by the layers' forwards, kept or not.
        swapped: of them, to the host.
        repeated: of them, by norms and activation functions once more.
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
        """Return the bytes that stay from step to step."""
        return self.weights + self.buffers + self.gradients + self.masters + self.moments

    @property
    def kept(self) -> float:
        """Activations at their peak."""
        return sum(self.activations.values())

    @property
    def beside(self) -> float:
        """On top of what stays, at the highest."""
        return max(self.kept + sum(self.temporary.values()), self.step)

    @property
    def allocated(self) -> float:
        """At the peak, as tensors need it."""
        return self.state + self.beside

    @property
    def total(self) -> float:
        """At the peak, with what the allocator is assumed to add."""
        return self.allocated + self.allocator


@dataclass(frozen=True)
class Chosen:
    """Which layers of a chunk a feature with ``--...-num-layers`` takes."""

    norm: bool
    act: bool
    swap: float
    """Share of what may be swapped."""


def of_job(job: Job, allocator: float) -> list[RankMemory]:
    """All pipeline ranks.

    Args:
        job: planned.
        allocator: what it adds to the rest, as a share.
    """
    weights = _of_weights(
        job.model,
        job.layout,
        job.features.sp_tp_sp,
        (job.shards, job.expert_shards),
        job.features.warmup_stage,
        job.training.grouped,
    )
    held = layouts.chunks(job.layout, job.model)
    kept = _Kinds(job)
    return [_rank(job, rank, weights[rank], held[rank], kept, allocator) for rank in range(job.layout.pp)]


@dataclass(frozen=True)
class _Weights:
    """Numbers of one pipeline rank's weights.

    Attributes:
        by_part: bytes of the rank, by part.
        all: between steps.
        dense: likewise, of those that are trained; likewise ``experts``.
        largest: matrix.
    """

    by_part: dict[str, float]
    all: float
    dense: float
    experts: float
    largest: float


@lru_cache(maxsize=32)
def _of_weights(
    model: Model, layout: Layout, whole_proj: bool, shards: tuple[int, int], indexers: bool, grouped: bool
) -> list[_Weights]:
    """Return them for each pipeline rank; searches ask for the same ones under many measures."""
    found = []
    for weights in sizes.of_ranks(model, layout, whole_proj):
        trained = [each for each in weights if not indexers or each.part == "indexer"]
        found.append(
            _Weights(
                sizes.by_part(weights, layout),
                sum(_held(layout, shards, weights)),
                *_held(layout, shards, trained),
                max((_one_matrix(model, layout, grouped, each) for each in weights), default=0.0),
            )
        )
    return found


class _Kinds:
    """Activations that layers keep, computed once for each kind of layer and choice of features."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.all = {kind: Layer(job, kind).items() for kind in set(job.model.kinds)}
        self.left: dict[tuple[LayerKind, Chosen], dict[str, float]] = {}
        self.sums: dict[tuple[LayerKind, tuple[str, ...]], float] = {}

    def kept(self, kind: LayerKind, which: Chosen) -> dict[str, float]:
        """Bytes by part of a layer."""
        if (kind, which) not in self.left:
            items = activations.freed(self.all[kind], self.job, which.norm, which.act, which.swap)
            items.append(activations.inputs_of_recomputed(self.job, which.norm, kind.experts))
            if "core_attn" in self.job.training.modules:
                items.append(activations.shared_selection(self.job, kind))
            self.left[kind, which] = activations.by_part(items)
        return self.left[kind, which]

    def whole(self) -> float:
        """Bytes of the largest kind with nothing freed."""
        return max(self.written(kind) for kind in self.all)

    def written(self, kind: LayerKind, *tags: str) -> float:
        """Bytes of a layer with nothing freed, or of its items with one of some tags."""
        if (kind, tags) not in self.sums:
            wanted = [item for item in self.all[kind] if not tags or item.tags & set(tags)]
            self.sums[kind, tags] = sum(item.nbytes for item in wanted)
        return self.sums[kind, tags]

    def attention(self, kind: LayerKind) -> float:
        """Bytes that attention saves in a layer."""
        return self.written(kind, "attention")

    def widest_attention(self) -> float:
        """Bytes that attention saves in a layer of the kind that saves most."""
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
    own, dense, experts = weights.all, weights.dense, weights.experts
    share = _share(job, dense, experts)
    masters = MASTER * share if training.bf16 else 0.0
    moments = (MOMENTS if training.adam else MOMENTS / 2) * share
    host = 0.0
    if features.swap_optimizer:
        host, masters, moments = masters + moments, 0.0, 0.0
    elif features.virtual:
        quota = features.virtual[min(rank, len(features.virtual) - 1)] * GIB
        host = min(quota, moments)
        moments -= host
    if features.reuse and training.bf16:
        masters -= BOTH_COPIES * share
    moe_layers = sum(job.model.pattern[number] for chunk in held for number in chunk)
    buffers = 2 * 4.0 * job.model.experts * moe_layers * job.model.expert_bias
    per_chunk = [_chunk(job, rank, chunk, held, kinds) for chunk in range(layout.vpp)]
    of_forwards = [sum(each.values()) for each in per_chunk]
    operands = [waiting.of_chunk(job, rank, *each) for each in enumerate(held)]
    peak = schedules.peak(job, rank, of_forwards, operands)
    kept: dict[str, float] = {}
    for count, parts in zip(peak.open, per_chunk, strict=True):
        for part, nbytes in parts.items():
            kept[part] = kept.get(part, 0.0) + count * nbytes
    if any(peak.waiting):
        kept[WAITING] = sum(map(operator.mul, peak.waiting, operands))
    if messages := _messages(job, rank):
        kept["messages"] = messages
    temporary = _temporary(job, rank, weights.largest, kinds)
    staging = STAGING / features.swap_parts * share if features.swap_optimizer else 0.0
    state = training.number * own + buffers + training.grad_number * (dense + experts) + masters + moments
    beside = max(sum(kept.values()) + sum(temporary.values()), staging)
    return RankMemory(
        rank=rank,
        numbers=dict(weights.by_part),
        weights=training.number * own,
        buffers=buffers,
        gradients=training.grad_number * (dense + experts),
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


def _held(layout: Layout, shards: tuple[int, int], weights: Iterable[Weight]) -> tuple[float, float]:
    """Numbers between steps, dense ones and experts', each shared by so many ranks."""
    experts = dense = 0.0
    for each in weights:
        if each.cut == "expert":
            experts += each.on_rank(layout) / shards[1]
        else:
            dense += each.on_rank(layout) / shards[0]
    return dense, experts


def _traffic(job: Job, rank: int, held: Sequence[tuple[int, ...]], kinds: _Kinds) -> dict[str, float]:
    """Count what the layers of a rank write, move and compute again, for one microbatch."""
    found = {"written": 0.0, "swapped": 0.0, "repeated": 0.0}
    choice = chosen_layers(job, rank, held)
    for chunk, layers in enumerate(held):
        for place, number in enumerate(layers):
            kind, which = job.model.kinds[number], choice[chunk, place]
            found["written"] += kinds.written(kind)
            if not _is_full(job, place):
                found["swapped"] += kinds.attention(kind) * which.swap
                tags = ("norm",) * which.norm + ("act",) * which.act
                found["repeated"] += kinds.written(kind, *tags) if tags else 0.0
    return found


def _share(job: Job, dense: float, experts: float) -> float:
    """Parameters whose optimizer state a rank holds."""
    if not job.training.distributed:
        return dense + experts
    return dense / job.layout.replicas + experts / job.layout.expert_replicas


def chosen_layers(job: Job, rank: int, held: Sequence[tuple[int, ...]]) -> dict[tuple[int, int], Chosen]:
    """By chunk and position: layers are taken by position inside their chunk, then by chunk."""
    features, full = job.features, job.training.full
    places = sorted(
        ((chunk, place) for chunk, layers in enumerate(held) for place in range(len(layers))),
        key=lambda each: (each[1], each[0]),
    )
    partial = [each for each in places if each[1] >= full >= 0]

    def first(on: bool, count: int | None) -> set[tuple[int, int]]:
        return set(partial if count is None else partial[:count]) if on else set()

    norm = first(features.recompute_norm, features.norm_layers)
    act = first(features.recompute_act, features.act_layers)
    swap = first(features.swap_attention, features.swap_layers)
    share = features.swap_shares[rank] if features.swap_shares else 1.0
    return {each: Chosen(each in norm, each in act, share * (each in swap)) for each in places}


def _is_full(job: Job, place: int) -> bool:
    return job.training.full < 0 or place < job.training.full


def _chunk(
    job: Job, rank: int, chunk: int, held: Sequence[tuple[int, ...]], kinds: _Kinds
) -> dict[str, float]:
    """Bytes by part that a forward of one chunk and microbatch keeps."""
    model, layout, training = job.model, job.layout, job.training
    rows = job.tokens / (layout.tp if layout.sequence else 1)
    stream = rows * model.hidden * training.number
    items: list[Kept] = []
    found: dict[str, float] = {}
    choice = chosen_layers(job, rank, held)
    for place, number in enumerate(held[chunk]):
        if _is_full(job, place):
            first = training.full >= 0 or place % training.full_group == 0
            items += [Kept("recomputed layers", stream)] if first else []
            items.append(activations.shared_selection(job, model.kinds[number]))
            continue
        for part, nbytes in kinds.kept(model.kinds[number], choice[chunk, place]).items():
            found[part] = found.get(part, 0.0) + nbytes
    is_first = rank == 0 and chunk == 0
    if is_first:
        mask = rows * model.hidden * training.dropout
        items.append(Kept("embedding", job.tokens * (8.0 + (layout.tp > 1)) + mask))
    elif _copies_its_input(job, bool(held[chunk]) and _is_full(job, 0)):
        items.append(Kept("received", stream))
    if layout.ends(rank, chunk):
        items += _end(job)
    for part, nbytes in activations.by_part(items).items():
        found[part] = found.get(part, 0.0) + nbytes
    return found


def _messages(job: Job, rank: int) -> float:
    """Between pipeline ranks: an output that is being sent, and the next input, received ahead."""
    layout = job.layout
    rows = job.tokens / (layout.tp if layout.sequence else 1)
    count = (rank > 0 or layout.vpp > 1) + (rank < layout.pp - 1 or layout.vpp > 1)
    return count * rows * job.model.hidden * job.training.number * (layout.pp > 1)


def _copies_its_input(job: Job, full: bool) -> bool:
    """Return whether the received activations stay beside what the first norm keeps of them."""
    recomputed = job.features.recompute_norm or "layernorm" in job.training.modules
    return job.training.bf16 and not (job.training.kernels or full or recomputed)


def _end(job: Job) -> list[Kept]:
    """Last norm, output and loss, and multi-token prediction layers."""
    model, layout, training = job.model, job.layout, job.training
    rows = job.tokens / (layout.tp if layout.sequence else 1)
    stream = rows * model.hidden * training.number
    loss = activations.of_loss(job)
    found = [*activations.norm_items(job, model.hidden, rows), Kept("output", stream + loss)]
    for kind in model.mtp_kinds:
        inner = Layer(job, kind).items()
        inner += activations.norm_items(job, 3 * model.hidden, rows)
        inner += [Kept("MTP", 2 * stream), Kept("MTP", stream + loss), Kept("MTP", job.tokens * 8.0)]
        found += [Kept("MTP", each.nbytes) for each in inner]
    return found


def _host_activations(
    job: Job, rank: int, held: Sequence[tuple[int, ...]], flights: Iterable[int], kinds: _Kinds
) -> float:
    """Saved tensors of attention on the host, of all microbatches in flight."""
    found = 0.0
    choice = chosen_layers(job, rank, held)
    for chunk, count in enumerate(flights):
        found += count * sum(
            kinds.attention(job.model.kinds[number]) * choice[chunk, place].swap
            for place, number in enumerate(held[chunk])
        )
    return found


def _temporary(job: Job, rank: int, largest: float, kinds: _Kinds) -> dict[str, float]:
    """Beside activations: what the widest operation of a forward or backward holds for a moment."""
    model, layout, training = job.model, job.layout, job.training
    number, tokens = training.number, job.tokens
    rows = tokens / (layout.tp if layout.sequence else 1)
    found: dict[str, float] = {}
    widest = model.ffn / layout.tp * tokens
    if model.experts:
        received = rows * model.router_topk * layout.etp * job.imbalance
        widest = max(widest, received * model.expert_ffn / layout.etp)
        found["dispatched tokens"] = 2 * received * model.hidden * number
    found["gradients of an MLP"] = (3 if model.gated else 2) * widest * number
    if rank == layout.end:
        found["logits"] = activations.logits_at_once(job)
    found["gradient of a weight"] = largest * number
    if job.sharding and job.shards > 1:
        unit = max(_units(job, rank))
        directions = 2 if job.features.pairs else 1
        found["gathered layers"] = directions * (1 + job.sharding.prefetch) * unit * number
        found["gradients of a layer"] = unit * (number + training.grad_number)
    if training.full:
        group = training.full_group if training.full < 0 else 1
        found["recomputed layer"] = kinds.whole() * group
    if job.features.swap_attention:
        found["attention of two layers"] = 2 * kinds.widest_attention()
    if model.sparse and not (job.features.indexer and job.features.attention):
        heads = max(model.index_heads, math.ceil(model.heads / layout.tp))
        found["matrices of stock DSA"] = 2.0 * 4 * tokens * job.sequence * heads
    return found


def _units(job: Job, rank: int) -> list[float]:
    """Numbers that are gathered together: of layers, embedding and output layer."""
    model, layout = job.model, job.layout
    whole = () if job.expert_shards > 1 else ("expert",)
    found = [
        sum(each.on_rank(layout) for each in sizes.layer(model, kind) if each.cut not in whole)
        for kind in set(model.kinds)
    ]
    if rank in (0, layout.end):
        found.append(model.vocabulary * model.hidden / layout.tp)
    return found


def _one_matrix(model: Model, layout: Layout, grouped: bool, weight: Weight) -> float:
    """Numbers of the largest matrix in a row: experts of a rank are one where they are grouped."""
    numbers = weight.on_rank(layout)
    if weight.cut != "expert":
        return numbers
    matrices = 1.5 if model.gated else 2.0
    local = 1.0 if grouped else model.experts / layout.ep
    return numbers / matrices / local
