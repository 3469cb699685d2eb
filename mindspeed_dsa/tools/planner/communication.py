"""Bytes that a rank receives in a step, by process group and collective.

With ``g`` ranks an all-gather or reduce-scatter of ``B`` bytes in all brings ``B (g - 1) / g`` to each, an
all-reduce twice that, an all-to-all of ``B`` bytes per rank ``B (g - 1) / g``, on every algorithm that sends
nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mindspeed_dsa.tools.planner import layouts, sizes
from mindspeed_dsa.tools.planner.job import Job, LayerKind
from mindspeed_dsa.tools.planner.sizes import Weight

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
FLOAT = 4


@dataclass(frozen=True)
class Transfer:
    """One kind of transfer of a pipeline rank.

    Attributes:
        group: ``TP``, ``EP``, ``ETP``, ``CP``, ``PP``, ``DP``, ``EDP`` or ``embedding``; ``FSDP`` and
            ``EFSDP`` where fewer ranks than those of DP and of EDP share a copy of the weights. SP's
            collectives run on the tensor parallel group.
        what: it carries.
        nbytes: that a rank receives in a step.
        when: ``forward`` or ``backward`` of every microbatch, or the ``end`` of the step.
    """

    group: str
    collective: Collective
    what: str
    nbytes: float
    when: Literal["forward", "backward", "end"]


def of_job(job: Job) -> list[list[Transfer]]:
    """Everything that each pipeline rank receives."""
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
        kinds = Counter(self.model.kinds[number] for chunk in self.held for number in chunk)
        if self.last:
            kinds.update(self.model.mtp_kinds)
        count = self.job.microbatches
        for kind, times in kinds.items():
            for each in self._layer(kind):
                yield _times(each, count * times)
        for kind, times in self._recomputed_layers().items():
            for each in self._layer(kind):
                if each.when == "forward":
                    again = Transfer(
                        each.group, each.collective, f"{each.what}, recomputed", each.nbytes, "backward"
                    )
                    yield _times(again, count * times)
        for each in (*self._ends(), *self._pipeline(), *self._shards()):
            yield _times(each, count)
        yield from self._step()

    def _recomputed_layers(self) -> Counter[LayerKind]:
        full = self.job.training.full
        return Counter(
            self.model.kinds[number]
            for chunk in self.held
            for place, number in enumerate(chunk)
            if full < 0 or place < full
        )

    # -- tensor parallel group ----------------------------------------------------------------

    def _tp(self, collective: Collective, what: str, width: float, when: str, size: int = 0) -> Transfer:
        """``width`` numbers for each token of the microbatch, whole."""
        ranks = self.layout.tp
        nbytes = self.n * width * (size or self.e) * (ranks - 1) / ranks
        return Transfer("TP", collective, what, nbytes * (2 if collective == "all-reduce" else 1), when)  # type: ignore[arg-type]

    def _column(self, what: str, width: float, again: bool = True) -> Iterator[Transfer]:
        """Input of a linear layer cut by columns; ``again``: gathered once more for the weight's gradient."""
        if not self.sequence:
            yield self._tp("all-reduce", what, width, "backward")
            return
        yield self._tp("all-gather", what, width, "forward")
        if again:
            yield self._tp("all-gather", what, width, "backward")
        yield self._tp("reduce-scatter", what, width, "backward")

    def _row(self, what: str, width: float) -> Iterator[Transfer]:
        """Output of a linear layer cut by rows."""
        if not self.sequence:
            yield self._tp("all-reduce", what, width, "forward")
            return
        yield self._tp("reduce-scatter", what, width, "forward")
        yield self._tp("all-gather", what, width, "backward")

    def _layer(self, kind: LayerKind) -> Iterator[Transfer]:
        if self.layout.tp > 1:
            yield from self._attention(kind)
            if not kind.experts:
                yield from self._column("dense MLP", self.model.hidden)
                yield from self._row("dense MLP", self.model.hidden)
            elif self.model.shared_ffn:
                yield from self._column("shared experts", self.model.hidden)
                yield from self._row("shared experts", self.model.hidden)
        if kind.experts:
            yield from self._experts()
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
        if self._needs_index(kind):
            if self.sequence:
                width = model.hidden + (model.query_lora or 0)
                yield self._tp("all-gather", "indexer's inputs", width, "forward")
            if model.index_loss:
                chosen = min(model.topk, self.job.sequence)
                dense = not features.kl_loss
                width = self.job.sequence if dense else chosen
                yield self._tp("all-reduce", "indexer's target", width, "forward", FLOAT)

    def _needs_index(self, kind: LayerKind) -> bool:
        """Short sequences attend to every key; the loss needs the indexer all the same."""
        return kind.selects and (self.model.index_loss or self.job.sequence > self.model.topk)

    # -- experts ------------------------------------------------------------------------------

    def _experts(self) -> Iterator[Transfer]:
        model, layout = self.model, self.layout
        rows = self.r * model.router_topk * self.job.imbalance
        share = (layout.ep - 1) / layout.ep
        for when in ("forward", "backward"):
            for what in ("dispatch", "combine"):
                yield Transfer("EP", "all-to-all", what, rows * model.hidden * self.e * share, when)
            yield Transfer("EP", "all-to-all", "probabilities", rows * FLOAT * share, when)
        if layout.etp > 1:
            gathered = rows * (layout.etp - 1)
            tokens = gathered * model.hidden
            # Outputs are summed in the precision of the probabilities.
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
        whole = self.job.training.micro * self.job.sequence * (ranks - 1) / ranks
        kernels = self.job.training.kernels and not model.sparse
        if model.latent and kernels:  # Transformer Engine sends keys and values by head, not latents
            width: float = model.heads / layout.tp * (model.query_dim + model.value_dim)
            again = True
        elif model.latent:
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
                yield self._tp("all-reduce", "loss", 3, "forward", FLOAT)
            for _ in range(model.mtp):
                yield from self._row("MTP embedding", model.hidden)
                yield from self._column("MTP", 2 * model.hidden)
                yield self._tp("all-gather", "MTP", model.hidden, "forward")
                yield self._tp("reduce-scatter", "MTP", model.hidden, "backward")

    def _pipeline(self) -> Iterator[Transfer]:
        layout = self.layout
        nbytes = self.r * self.model.hidden * self.e
        stages = layout.pp * layout.vpp
        for chunk in range(layout.vpp):
            stage = layout.stage(self.rank, chunk)
            if stage and layout.rank_of(stage - 1) != self.rank:
                yield Transfer("PP", "send", "activations", nbytes, "forward")
            if stage < stages - 1 and layout.rank_of(stage + 1) != self.rank:
                yield Transfer("PP", "send", "gradients", nbytes, "backward")

    def _shards(self) -> Iterator[Transfer]:
        """Gathers of sharded weights, and sums of their gradients, of one microbatch."""
        layout = self.layout
        yield from self._shards_of(False, ("DP", "FSDP"), self.job.shards, layout.replicas)
        # Experts that are not dealt out travel with everything else.
        groups = ("EDP", "EFSDP") if layout.ep > 1 else ("DP", "FSDP")
        yield from self._shards_of(True, groups, self.job.expert_shards, layout.expert_replicas)

    def _shards_of(
        self, experts: bool, groups: tuple[str, str], shards: int, replicas: int
    ) -> Iterator[Transfer]:
        """Transfers of dense weights or of routed experts.

        Args:
            experts: which of the two.
            groups: of all ranks with the same weights, and of those of them that share a copy.
            shards: ranks that share a copy.
            replicas: ranks with the same weights.
        """
        if shards == 1:
            return
        size, share, copies = self.job.training.grad_number, (shards - 1) / shards, replicas // shards
        group = groups[0] if copies == 1 else groups[1]
        own = [each for each in self.weights if (each.cut == "expert") == experts]
        numbers = sum(each.on_rank(self.layout) for each in own)
        # The embedding's backward reads no weight.
        again = numbers - sum(each.on_rank(self.layout) for each in own if each.part == "embedding")
        trained = sum(
            each.on_rank(self.layout) for each in self._trained() if (each.cut == "expert") == experts
        )
        yield Transfer(group, "all-gather", "weights", numbers * self.e * share, "forward")
        yield Transfer(group, "all-gather", "weights", again * self.e * share, "backward")
        yield Transfer(group, "reduce-scatter", "gradients", trained * size * share, "backward")
        among = 2 * trained / shards * size * (copies - 1) / copies
        yield Transfer(groups[0], "all-reduce", "gradients of copies", among, "backward")

    def _trained(self) -> list[Weight]:
        return [w for w in self.weights if not self.job.features.warmup_stage or w.part == "indexer"]

    def _step(self) -> Iterator[Transfer]:
        layout, training = self.layout, self.job.training
        trained, shards = self._trained(), self.job.shards
        size = training.grad_number
        if layout.tp > 1:
            summed = sum(w.numbers for w in trained if (w.summed and self.sequence) or w.averaged)
            nbytes = 2 * summed / shards * size * (layout.tp - 1) / layout.tp
            yield Transfer("TP", "all-reduce", "gradients of copies", nbytes, "end")
        groups = (("DP", layout.replicas, False), ("EDP", layout.expert_replicas, True))
        for group, ranks, experts in groups:
            share = (ranks - 1) / ranks
            # Experts that are not dealt out are reduced with everything else.
            own = [w for w in trained if (w.cut == "expert" and layout.ep > 1) == experts]
            cut = {True: self.job.expert_shards, False: shards}
            own = [w for w in own if cut[w.cut == "expert"] == 1]
            numbers = sum(w.on_rank(layout) for w in own) * share
            if training.distributed:
                yield Transfer(group, "reduce-scatter", "gradients", numbers * size, "end")
                # Two optimizers, of dense weights and of experts: without overlap each gathers them all.
                gathers = 2 if layout.ep > 1 and not training.overlap_param else 1
                yield Transfer(group, "all-gather", "weights", gathers * numbers * training.number, "end")
            else:
                yield Transfer(group, "all-reduce", "gradients", 2 * numbers * size, "end")
        shared = (self.model.tied or self.model.mtp) and layout.end > 0 and (self.rank == 0 or self.last)
        if shared:
            nbytes = self.model.vocabulary * self.model.hidden / layout.tp / shards * size
            yield Transfer("embedding", "all-reduce", "gradients", nbytes, "end")


def _times(each: Transfer, count: int) -> Transfer:
    return replace(each, nbytes=each.nbytes * count)


def by_group(transfers: list[Transfer]) -> dict[str, float]:
    """Bytes by process group."""
    found: dict[str, float] = {}
    for each in transfers:
        found[each.group] = found.get(each.group, 0.0) + each.nbytes
    return found
