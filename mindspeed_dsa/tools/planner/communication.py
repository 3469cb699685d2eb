"""Estimate of the bytes that a rank receives in a step, by process group and collective.

In an all-gather or reduce-scatter of ``B`` bytes in total over ``g`` ranks, each rank receives ``B (g - 1) /
g`` bytes, and twice as much in an all-reduce. In an all-to-all of ``B`` bytes per rank, each rank receives
``B (g - 1) / g``. A dispatch is an all-to-all that sends a token once to each rank with some of its experts.
Algorithms that send the same bytes twice need more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mindspeed_dsa.tools.planner import layouts, sizes
from mindspeed_dsa.tools.planner.job import Job, LayerKind
from mindspeed_dsa.tools.planner.routing import copies
from mindspeed_dsa.tools.planner.sizes import Weight

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "dispatch", "send"]
FLOAT, LONG = 4, 8


@dataclass(frozen=True)
class Transfer:
    """One kind of communication of a pipeline rank.

    Attributes:
        group: process group: ``TP``, ``EP``, ``ETP``, ``CP``, ``PP``, ``DP``, ``EDP`` or ``embedding``.
            ``FSDP`` and ``EFSDP`` are used if weights are sharded over only a part of the DP or EDP ranks.
            Sequence parallel collectives are counted as TP.
        what: name of the communicated tensors.
        nbytes: bytes that a rank receives in a step.
        when: ``forward`` or ``backward`` of every microbatch, or the ``end`` of the step.
    """

    group: str
    collective: Collective
    what: str
    nbytes: float
    when: Literal["forward", "backward", "end"]


def of_job(job: Job) -> list[list[Transfer]]:
    """Return, for each pipeline rank, its communication in one training step."""
    weights = sizes.rank_weights(job)
    return [
        [each for each in _Rank(job, rank, weights[rank]).transfers() if each.nbytes]
        for rank in range(job.layout.pp)
    ]


class _Rank:
    def __init__(self, job: Job, rank: int, weights: Sequence[Weight]) -> None:
        self.job, self.rank, self.weights = job, rank, weights
        self.model, self.layout = job.model, job.layout
        self.held = layouts.chunks(job.layout, job.model)[rank]
        self.n, self.e = job.tokens, job.training.number
        self.r = self.n / (self.layout.tp if self.layout.sequence else 1)
        self.sequence = self.layout.sequence
        self.last = rank == self.layout.end

    def transfers(self) -> Iterator[Transfer]:
        kinds = Counter(self.job.kinds[number] for chunk in self.held for number in chunk)
        if self.last:
            kinds.update(self.job.mtp_kinds)
        count = self.job.microbatches
        for kind, times in kinds.items():
            for transfer in self._layer(kind):
                yield _times(transfer, count * times)
        whole = self._recomputed_layers()
        for kind, times in kinds.items():
            for transfer in self._recomputed_modules(kind):
                if transfer.when == "forward":
                    again = replace(transfer, what=f"{transfer.what}, recomputed", when="backward")
                    yield _times(again, count * (times - whole[kind]))
        for kind, times in whole.items():
            for transfer in self._layer(kind):
                if transfer.when == "forward":
                    again = replace(transfer, what=f"{transfer.what}, recomputed", when="backward")
                    yield _times(again, count * times)
        for transfer in (*self._ends(), *self._vocabulary(), *self._pipeline(), *self._shards()):
            yield _times(transfer, count)
        yield from self._step()

    def _recomputed_layers(self) -> Counter[LayerKind]:
        full = self.job.training.full
        return Counter(
            self.job.kinds[number]
            for chunk in self.held
            for place, number in enumerate(chunk)
            if full < 0 or place < full
        )

    def _recomputed_modules(self, kind: LayerKind) -> Iterator[Transfer]:
        """Yield the transfers of a layer's modules that selective recomputation repeats."""
        modules = set(self.job.training.modules)
        if kind.experts and "moe" in modules:
            yield from self._experts(kind.skew)
        shared = kind.experts and self.model.shared_ffn and modules & {"moe", "shared_experts"}
        if self.layout.tp > 1 and (shared or (not kind.experts and "mlp" in modules)):
            yield from self._mlp("shared experts" if kind.experts else "dense MLP")

    def _mlp(self, part: str) -> Iterator[Transfer]:
        yield from self._column(part, self.model.hidden)
        yield from self._row(part, self.model.hidden)

    # -- tensor parallel group ----------------------------------------------------------------

    def _tp(self, collective: Collective, what: str, width: float, when: str, size: int = 0) -> Transfer:
        """Return a TP collective whose tensor has ``width`` elements per token of the microbatch."""
        ranks = self.layout.tp
        # TP 8, 4096 tokens of width 7168 in bf16: 4096 x 7168 x 2 x 7 / 8 bytes = 49 MiB for an all-gather.
        nbytes = self.n * width * (size or self.e) * (ranks - 1) / ranks
        return Transfer("TP", collective, what, nbytes * (2 if collective == "all-reduce" else 1), when)  # type: ignore[arg-type]

    def _column(self, what: str, width: float, again: bool = True) -> Iterator[Transfer]:
        """Yield a column-parallel layer's collectives; with ``again``, backward all-gathers the input too."""
        if not self.sequence:
            # Every rank has the full input; only its gradient is summed over the ranks' columns.
            yield self._tp("all-reduce", what, width, "backward")
            return
        yield self._tp("all-gather", what, width, "forward")
        if again:
            yield self._tp("all-gather", what, width, "backward")
        yield self._tp("reduce-scatter", what, width, "backward")

    def _row(self, what: str, width: float) -> Iterator[Transfer]:
        """Yield a row-parallel layer's collectives."""
        if not self.sequence:
            # The output is a sum over the ranks' rows; its gradient is the same on all ranks.
            yield self._tp("all-reduce", what, width, "forward")
            return
        yield self._tp("reduce-scatter", what, width, "forward")
        yield self._tp("all-gather", what, width, "backward")

    def _layer(self, kind: LayerKind) -> Iterator[Transfer]:
        if self.layout.tp > 1:
            yield from self._attention(kind)
            if not kind.experts:
                yield from self._mlp("dense MLP")
            elif self.model.shared_ffn:
                yield from self._mlp("shared experts")
        if kind.experts:
            yield from self._experts(kind.skew)
        yield from self._context(kind)

    def _attention(self, kind: LayerKind) -> Iterator[Transfer]:
        model, features = self.model, self.job.features
        if not model.latent:
            yield from self._column("attention", model.hidden)
            yield from self._row("attention", model.hidden)
            return
        yield from self._column("query", model.query_lora or model.hidden)
        expanded_later = self.job.absorbed if model.sparse else not self.job.training.kernels
        yield from self._column("latent key", model.kv_lora, again=not expanded_later)
        yield from self._column("rotary key", model.rope, again=False)
        if features.sp_tp_sp:
            width = model.heads * model.value / self.layout.tp
            for when in ("forward", "backward"):
                yield self._tp("all-to-all", "attention's output", width, when)
        else:
            yield from self._row("attention's output", model.hidden)
        if self._needs_index(kind) and self.sequence:
            width = model.hidden + (model.query_lora or 0)
            yield self._tp("all-gather", "indexer's inputs", width, "forward")
        if (kind.selects or self.job.has_served_losses) and model.index_loss:
            width = self.job.sequence if not features.kl_loss else min(model.topk, self.job.sequence)
            yield self._tp("all-reduce", "indexer's target", width, "forward", FLOAT)

    def _needs_index(self, kind: LayerKind) -> bool:
        """Return whether the layer's indexer runs: it has a loss, or sequences are longer than ``topk``."""
        return kind.selects and (self.model.index_loss or self.job.sequence > self.model.topk)

    # -- experts ------------------------------------------------------------------------------

    def _experts(self, skew: float) -> Iterator[Transfer]:
        model, layout = self.model, self.layout
        # Each token is sent to topk experts; on average 1 / EP of them are on the same rank.
        rows = self.r * model.router_topk * skew
        flex = self.job.training.flex
        # 128 experts, topk 8, EP 8: a token's experts are on 5.3 of 8 ranks, so 5.3 copies are sent, not 8.
        sent = self.r * skew * copies(model.routing, layout.ep) if flex else rows
        collective: Collective = "dispatch" if flex else "all-to-all"
        # EP 32: 4096 tokens x 8 experts x 7168 x 2 bytes = 448 MiB per dispatch, and 31 / 32 leave the rank.
        share = (layout.ep - 1) / layout.ep
        for when in ("forward", "backward"):
            for what in ("dispatch", "combine"):
                yield Transfer("EP", collective, what, sent * model.hidden * self.e * share, when)
            yield Transfer("EP", collective, "probabilities", sent * FLOAT * share, when)
        if layout.etp > 1:
            gathered = rows * (layout.etp - 1)
            tokens = gathered * model.hidden
            # The router's probabilities are fp32, so outputs weighted by them are reduced in fp32.
            yield Transfer("ETP", "all-gather", "experts' tokens", tokens * self.e, "forward")
            yield Transfer("ETP", "reduce-scatter", "experts' outputs", tokens * FLOAT, "forward")
            yield Transfer("ETP", "all-gather", "experts' outputs", tokens * FLOAT, "backward")
            yield Transfer("ETP", "reduce-scatter", "experts' tokens", tokens * self.e, "backward")
            yield Transfer("ETP", "all-gather", "probabilities", gathered * FLOAT, "forward")
            yield Transfer("ETP", "reduce-scatter", "probabilities", gathered * FLOAT, "backward")

    # -- context parallel group ---------------------------------------------------------------

    def _context(self, kind: LayerKind) -> Iterator[Transfer]:
        model, layout, features = self.model, self.layout, self.job.features
        ranks = layout.cp
        if ranks == 1:
            return
        # Tokens on the other CP ranks: 8192 on CP 4 leave 6144.
        whole = self.job.training.micro * self.job.sequence * (ranks - 1) / ranks
        kernels = self.job.training.kernels and not model.sparse
        if model.latent and kernels:  # Transformer Engine sends the expanded keys and values, not latents
            width: float = model.heads / layout.tp * (model.query_dim + model.value_dim)
            again = True
        elif model.latent:
            # Per token 512 + 64 numbers of the latent key, and 128 of the indexer's key.
            width = model.kv_lora + model.rope + model.index_dim * self._needs_index(kind)
            again = not (model.sparse and features.keep_gathered)
        else:
            width = 2 * max(1.0, model.kv_heads / layout.tp) * model.head_dim
            again = True
        gather: Collective = "all-gather" if model.sparse else "send"
        if not model.sparse and layout.cp_algorithm == "a2a":
            heads = model.heads / layout.tp * (model.query_dim + model.value_dim)
            moved = whole / ranks * heads * self.e + (
                whole * width * self.e if model.latent and not kernels else whole / ranks * width * self.e
            )
            for when in ("forward", "backward"):
                yield Transfer("CP", "all-to-all", "heads", moved, when)
            return
        yield Transfer("CP", gather, "keys", whole * width * self.e, "forward")
        if again:
            yield Transfer("CP", gather, "keys", whole * width * self.e, "backward")
        # Without the KL loss the indexer's keys have no gradient.
        trained = width if model.index_loss else width - model.index_dim * self._needs_index(kind)
        size = self.e if kernels else FLOAT
        reduce: Collective = "reduce-scatter" if model.sparse else "send"
        yield Transfer("CP", reduce, "gradients of keys", whole * trained * size, "backward")

    # -- ends of the model, and of the step ---------------------------------------------------

    def _ends(self) -> Iterator[Transfer]:
        model = self.model
        if self.layout.tp == 1:
            return
        if self.rank == 0:
            yield from self._row("embedding", model.hidden)
        if self.last:
            for _ in range(1 + model.mtp):
                yield from self._column("output", model.hidden)
                if self.job.vocabulary_ranks == 1:
                    yield self._tp("all-reduce", "loss", 3, "forward", FLOAT)
            for _ in range(model.mtp):
                yield from self._row("MTP embedding", model.hidden)
                yield from self._column("MTP", 2 * model.hidden)
                yield self._tp("all-gather", "MTP", model.hidden, "forward")
                yield self._tp("reduce-scatter", "MTP", model.hidden, "backward")

    def _vocabulary(self) -> Iterator[Transfer]:
        """Yield the transfers of embedding and output layers that context parallel ranks divide."""
        ranks = self.job.vocabulary_ranks
        if ranks == 1:
            return
        others, mtp, parts = self.n * (ranks - 1), self.model.mtp, ranks * self.layout.tp
        rows = others * self.model.hidden * self.e
        for _ in range((self.rank == 0) + mtp * self.last):
            yield Transfer("CP", "all-gather", "token ids", others * LONG, "forward")
            yield Transfer("CP", "reduce-scatter", "embeddings", rows, "forward")
            yield Transfer("CP", "all-gather", "gradients of embeddings", rows, "backward")
        for _ in range((1 + mtp) * self.last):
            yield Transfer("CP", "all-gather", "hidden states", rows, "forward")
            yield Transfer("CP", "all-gather", "labels and their weights", others * (LONG + FLOAT), "forward")
            sums = 3 * FLOAT * self.n * ranks
            yield Transfer("CP", "all-reduce", "loss", 2 * sums * (parts - 1) / parts, "forward")
            yield Transfer("CP", "all-gather", "gradients of losses", others * FLOAT, "backward")
            yield Transfer("CP", "reduce-scatter", "gradients of hidden states", rows, "backward")

    def _pipeline(self) -> Iterator[Transfer]:
        layout = self.layout
        nbytes = self.r * self.model.hidden * self.e
        stages = layout.pp * layout.vpp
        for chunk in range(layout.vpp):
            stage = layout.stage(self.rank, chunk)
            # Consecutive stages on the same rank, as in the middle of a V, send nothing.
            if stage and layout.rank_of(stage - 1) != self.rank:
                yield Transfer("PP", "send", "activations", nbytes, "forward")
            if stage < stages - 1 and layout.rank_of(stage + 1) != self.rank:
                yield Transfer("PP", "send", "gradients", nbytes, "backward")

    def _shards(self) -> Iterator[Transfer]:
        """Yield FSDP's weight gathers and gradient reductions for one microbatch."""
        layout = self.layout
        yield from self._shards_of(False, ("DP", "FSDP"), self.job.shards, layout.replicas)
        # Without EP, FSDP gathers the experts together with the dense weights.
        groups = ("EDP", "EFSDP") if layout.ep > 1 else ("DP", "FSDP")
        yield from self._shards_of(True, groups, self.job.expert_shards, layout.expert_replicas)

    def _shards_of(
        self, experts: bool, groups: tuple[str, str], shards: int, replicas: int
    ) -> Iterator[Transfer]:
        """Yield the transfers of dense weights or of routed experts.

        Args:
            experts: whether the weights are routed experts.
            groups: name of the data parallel group, and of the subgroup over which weights are sharded.
            shards: number of ranks over which weights are sharded.
            replicas: size of the data parallel group.
        """
        if shards == 1:
            return
        size, share, copies = self.job.training.grad_number, (shards - 1) / shards, replicas // shards
        group = groups[0] if copies == 1 else groups[1]
        weights = [weight for weight in self.weights if (weight.cut == "expert") == experts]
        numbers = sum(weight.on_rank(self.layout) for weight in weights)
        # The embedding's backward does not read its weight, so it is not gathered again.
        again = numbers - sum(weight.on_rank(self.layout) for weight in weights if weight.part == "embedding")
        trained = sum(
            weight.on_rank(self.layout) for weight in self._trained() if (weight.cut == "expert") == experts
        )
        sharding, step = self.job.sharding, 1 / self.job.microbatches  # what is sent once in a step
        assert sharding is not None, "weights are sharded"
        if sharding.whole:
            numbers *= step * sharding.stays
            trained *= step
        yield Transfer(group, "all-gather", "weights", numbers * self.e * share, "forward")
        if not sharding.stays:
            yield Transfer(group, "all-gather", "weights", again * self.e * share, "backward")
        yield Transfer(group, "reduce-scatter", "gradients", trained * size * share, "backward")
        among = 2 * trained / shards * size * (copies - 1) / copies
        yield Transfer(groups[0], "all-reduce", "gradients of copies", among, "backward")

    def _trained(self) -> list[Weight]:
        return [w for w in self.weights if not self.job.features.warmup_stage or w.part == "indexer"]

    def _gathered(self, weight: Weight) -> int:
        """Return the bytes of a number of the weight when ranks gather it after a step."""
        training = self.job.training
        return 1 if training.gathers and weight.part in sizes.MULTIPLIED else training.number

    def _step(self) -> Iterator[Transfer]:
        layout, training = self.layout, self.job.training
        trained, shards = self._trained(), self.job.shards
        size = training.grad_number
        if layout.tp > 1:
            summed = sum(w.numbers for w in trained if (w.summed and self.sequence) or w.averaged)
            nbytes = 2 * summed / shards * size * (layout.tp - 1) / layout.tp
            yield Transfer("TP", "all-reduce", "gradients of copies", nbytes, "end")
        # Experts have buffers of their own with EP, and a divided vocabulary always has.
        apart = ("vocabulary", "expert") if layout.ep > 1 else ("vocabulary",)
        groups = (("DP", layout.replicas, ""), ("DP", layout.dp, "vocabulary"))
        for group, ranks, kind in (*groups, ("EDP", layout.expert_replicas, "expert")):
            share = (ranks - 1) / ranks
            weights = [w for w in trained if (w.cut if w.cut in apart else "") == kind]
            cut = {True: self.job.expert_shards, False: shards}
            weights = [w for w in weights if cut[w.cut == "expert"] == 1]
            numbers = sum(w.on_rank(layout) for w in weights) * share
            if training.distributed:
                yield Transfer(group, "reduce-scatter", "gradients", numbers * size, "end")
                # Without overlap, each of the two distributed optimizers (dense and expert weights) gathers
                # all weights. The optimizer of a divided vocabulary gathers its own.
                more = (layout.ep > 1) + (kind == "vocabulary")
                gathers = 1 if training.overlap_param else 1 + more
                nbytes = share * sum(w.on_rank(layout) * self._gathered(w) for w in weights)
                yield Transfer(group, "all-gather", "weights", gathers * nbytes, "end")
            else:
                yield Transfer(group, "all-reduce", "gradients", 2 * numbers * size, "end")
        # The first and last stage have copies of the embedding, whose gradients are summed.
        shared = (self.model.tied or self.model.mtp) and layout.end > 0 and (self.rank == 0 or self.last)
        if shared:
            parts = layout.tp * self.job.vocabulary_ranks
            nbytes = self.model.vocabulary * self.model.hidden / parts / shards * size
            yield Transfer("embedding", "all-reduce", "gradients", nbytes, "end")


def _times(each: Transfer, count: int) -> Transfer:
    return replace(each, nbytes=each.nbytes * count)


def by_group(transfers: list[Transfer]) -> dict[str, float]:
    """Return a dict from process group to the bytes that its transfers receive in a step."""
    sums: dict[str, float] = {}
    for transfer in transfers:
        sums[transfer.group] = sums.get(transfer.group, 0.0) + transfer.nbytes
    return sums
