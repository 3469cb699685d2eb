"""Job that is planned: a model, a layout, how it is trained, and which features are on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from mindspeed_dsa.context_parallel.padding import padded_length
from mindspeed_dsa.megatron.batches import GLOBAL, SCHEDULE
from mindspeed_dsa.megatron.selections import Sharing


class LayerKind(NamedTuple):
    """LayerKind of a layer, as far as plans tell layers apart.

    Attributes:
        experts: its MLP has experts.
        selects: it has an indexer, which selects keys.
        serves: layers above attend to the keys that it selects.
    """

    experts: bool
    selects: bool = False
    serves: bool = False


EVERY_LAYER = Sharing()
"""Sharing in models whose layers all select keys for themselves."""


@dataclass(frozen=True)
class Model:
    """Sizes of a GPT as Megatron builds it; names are Megatron's flags.

    Attributes:
        vocabulary: rows of the embedding, padded.
        pattern: for each layer, whether it has experts.
        gated: SwiGLU: the first matrix of an MLP has two halves.
        bias: of linear layers.
        qkv_bias: of the projection to query, key and value.
        layer_norm: norms are LayerNorm, with a bias, instead of RMSNorm.
        query_lora: 0: queries are projected without a latent.
        latent: multi-head latent attention; otherwise ``head_dim`` and ``kv_heads`` hold.
        sparse: DeepSeek Sparse Attention.
        sharing: which layers select keys there.
        mtp: multi-token prediction layers.
        words: rows of the embedding before padding; 0: padded rows are given, whatever the layout.
        multiple: tensor parallel ranks times this divide the padded rows.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    pattern: tuple[bool, ...] = ()
    gated: bool = True
    bias: bool = False
    qkv_bias: bool = False
    layer_norm: bool = False
    tied: bool = False
    learned_positions: int = 0
    head_dim: int = 0
    kv_heads: int = 0
    latent: bool = True
    query_lora: int = 0
    kv_lora: int = 0
    nope: int = 0
    rope: int = 0
    value: int = 0
    qk_norm: bool = True
    sparse: bool = False
    index_heads: int = 0
    index_dim: int = 0
    topk: int = 0
    index_loss: bool = False
    sharing: Sharing = EVERY_LAYER
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    router_topk: int = 0
    expert_bias: bool = False
    mtp: int = 0
    words: int = 0
    multiple: int = 1

    def padded(self, tp: int) -> Model:
        """Return the model with the rows of the embedding that so many tensor parallel ranks have."""
        step = self.multiple * tp
        rows = math.ceil(self.words / step) * step or self.vocabulary
        return self if rows == self.vocabulary else replace(self, vocabulary=rows)

    @property
    def query_dim(self) -> int:
        """Return the size of one head's query and key."""
        return self.nope + self.rope if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Return the size of one head's value."""
        return self.value if self.latent else self.head_dim

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Return the kind of each layer of the decoder."""
        selects = [self.sharing.computes(layer) for layer in range(1, self.layers + 1)]
        return self._kinds(self.pattern, selects)

    @cached_property
    def mtp_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kind of each layer of multi-token prediction, whose MLP is that of the last layer."""
        selects = [self.sharing.mtp_computes(layer) for layer in range(1, self.mtp + 1)]
        return self._kinds(self.pattern[-1:] * self.mtp, selects)

    def _kinds(self, experts: tuple[bool, ...], selects: list[bool]) -> tuple[LayerKind, ...]:
        if not self.sparse:
            return tuple(LayerKind(each) for each in experts)
        above = (*selects[1:], True)[: len(selects)]
        serves = [own and not other for own, other in zip(selects, above, strict=True)]
        return tuple(map(LayerKind, experts, selects, serves))

    @property
    def selecting(self) -> tuple[int, ...]:
        """Return the numbers, from 1, of the decoder's layers that select keys."""
        return tuple(number for number, kind in enumerate(self.kinds, start=1) if kind.selects)


@dataclass(frozen=True)
class Layout:
    """Who holds what; names are the field's.

    Attributes:
        cp_algorithm: ``--cp-comm-type``, for dense attention.
        group: ``--microbatch-group-size-per-virtual-pipeline-stage``.
        first: layers of the first pipeline rank, where given; likewise ``last``.
        embedding_counts: the embedding takes a layer's place in the split; likewise ``loss_counts``.
        stages: letters of each chunk of ``--pipeline-model-parallel-layout``; empty: there is none.
        v_shaped: second chunks lie on the ranks in reverse order, as in DualPipeV.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1
    sequence: bool = False
    group: int = 0
    first: int | None = None
    last: int | None = None
    embedding_counts: bool = False
    loss_counts: bool = False
    stages: tuple[str, ...] = ()
    v_shaped: bool = False
    cp_algorithm: str = "p2p"

    @property
    def devices(self) -> int:
        """Ranks of the job."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks with the same dense weights: data parallel and context parallel ones."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks with the same routed experts."""
        return max(1, self.devices // (self.pp * self.ep * self.etp))

    @property
    def rows(self) -> int:
        """Parts that a sequence is cut into where nothing needs all of it."""
        return self.cp * (self.tp if self.sequence else 1)

    @property
    def end(self) -> int:
        """Pipeline rank that has output layer and loss, in its last chunk."""
        return 0 if self.v_shaped else self.pp - 1

    def ends(self, rank: int, chunk: int) -> bool:
        """Return whether the model ends with a rank's chunk."""
        return rank == self.end and chunk == self.vpp - 1

    def stage(self, rank: int, chunk: int) -> int:
        """Return which part of the model a rank's chunk is, in the order that a microbatch takes."""
        if self.v_shaped and chunk:
            return 2 * self.pp - 1 - rank
        return chunk * self.pp + rank

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that has a part of the model."""
        if self.v_shaped:
            return min(stage, 2 * self.pp - 1 - stage)
        return stage % self.pp

    def __str__(self) -> str:
        chunks = 1 if self.v_shaped else self.vpp
        sizes = (("TP", self.tp), ("PP", self.pp), ("VPP", chunks), ("EP", self.ep), ("ETP", self.etp))
        shown = [f"{name}{size}" for name, size in (*sizes, ("CP", self.cp), ("DP", self.dp)) if size > 1]
        return " ".join([*shown, *["in a V"] * self.v_shaped]) or "1 device"


@dataclass(frozen=True)
class Training:
    """A step, its precisions and what Megatron recomputes.

    Attributes:
        kernels: norms, activations and attention run in fused kernels, which keep their inputs only.
        fused_glu: the gated activation keeps its input only.
        full: layers of each chunk that are recomputed in full; -1: all of them.
        full_group: such layers that share one kept input.
        modules: of selective recomputation.
        flash: attention keeps no probabilities.
        dropout: of the outputs of attention and MLP, and of the embedding.
        attention_dropout: of attention's probabilities.
        grad_half: gradients are of two bytes.
        schedule: sizes of --step-batch-size-schedule, of which the largest is planned.
    """

    sequence: int
    micro: int
    batch: int
    bf16: bool = True
    grad_half: bool = False
    distributed: bool = False
    adam: bool = True
    overlap_grad: bool = False
    overlap_param: bool = False
    kernels: bool = False
    fused_glu: bool = False
    flash: bool = False
    grouped: bool = False
    full: int = 0
    full_group: int = 1
    modules: tuple[str, ...] = ()
    dropout: bool = False
    attention_dropout: bool = False
    schedule: tuple[int, ...] = ()

    @property
    def batches(self) -> tuple[int, ...]:
        """Samples of a step, over all ranks, in the order in which steps have them."""
        return self.schedule or (self.batch,)

    @property
    def batch_flag(self) -> str:
        """Flag that sets them, with its value."""
        words = " ".join(map(str, self.batches))
        return f"sizes {words} in {SCHEDULE}" if self.schedule else f"{GLOBAL} {words}"

    @property
    def number(self) -> int:
        """Bytes of an activation's number."""
        return 2 if self.bf16 else 4

    @property
    def grad_number(self) -> int:
        """Bytes of a gradient's number in Megatron's buffers."""
        return 2 if self.grad_half else 4


@dataclass(frozen=True)
class Sharding:
    """Sharding of dense weights, their gradients and optimizer state (``--use-torch-fsdp2``).

    Attributes:
        ranks: that share one copy; 0: all data and context parallel ranks.
        prefetch: layers gathered ahead of the one that computes.
        experts: routed experts as well, over the ranks that have the same ones.
    """

    ranks: int = 0
    prefetch: int = 1
    experts: bool = False


@dataclass(frozen=True)
class Features:
    """Features of this library, as far as they change a plan.

    Attributes:
        by_length: sequences no longer than ``topk`` attend by head all the same.
        virtual: GiB of moments in mapped host memory, per pipeline rank or one for all; inf: all.
        norm_layers: of a stage; None: all of them. Likewise the other two.
        swap_auto: only what computation hides is swapped.
        swap_bytes: of a rank, on the host at one time, at most.
        swap_shares: of what each pipeline rank may swap, once it is known; empty: all.
        pairs: forward and backward of two microbatches share a block (``--moe-fb-overlap``).
        split: weight gradients are computed apart from the backwards, where the schedule has them.
        waiting: of one chunk and microbatch each, that may wait on a rank; None: as many as its number.
        chunked_loss: ``auto``, ``forward`` or ``backward``, when the gradient of the output projection is
            formed where its logits are never whole; empty where they are.
        ahead: ``in bubbles`` or ``in advance``, of ``--recompute-in-...``.
    """

    fused: bool = False
    absorb: bool = False
    by_length: bool = False
    indexer: bool = False
    attention: bool = False
    kl_loss: bool = False
    reuse: bool = False
    swap_optimizer: bool = False
    swap_parts: int = 16
    virtual: tuple[float, ...] = ()
    recompute_norm: bool = False
    norm_layers: int | None = None
    recompute_act: bool = False
    act_layers: int | None = None
    swap_attention: bool = False
    swap_auto: bool = False
    swap_bytes: float = math.inf
    swap_shares: tuple[float, ...] = ()
    swap_layers: int | None = None
    swap_modules: tuple[str, ...] = ("self_attention",)
    swap_least: int = 2**20
    permute_fusion: bool = False
    alltoall_overlap: bool = False
    pairs: bool = False
    split: bool = False
    waiting: int | None = None
    batch_overlap: bool = False
    coc: bool = False
    sp_tp_sp: bool = False
    balanced: bool = False
    keep_gathered: bool = False
    warmup_stage: bool = False
    chunked_loss: str = ""
    ahead: str = ""


@dataclass(frozen=True)
class Job:
    """Everything a plan is made from.

    Attributes:
        imbalance: tokens of the fullest rank's experts over the mean.
        sharding: None: every replica has all dense weights.
        notes: what the plan leaves out.
    """

    model: Model
    layout: Layout
    training: Training
    features: Features = Features()
    imbalance: float = 1.0
    sharding: Sharding | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def microbatches(self) -> int:
        """Per step and data parallel rank."""
        return self.training.batch // (self.training.micro * self.layout.dp)

    @property
    def sequence(self) -> int:
        """Return the rows of a sequence, padding included: as many as ranks divide."""
        parts = self.layout.tp if self.layout.sequence else 1
        return padded_length(self.training.sequence, self.layout.cp, parts)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the dense weights."""
        return 1 if self.sharding is None else self.sharding.ranks or self.layout.replicas

    @property
    def expert_shards(self) -> int:
        """Ranks that share one copy of the routed experts: near ones that have the same."""
        if self.sharding is None or not self.sharding.experts:
            return 1
        return max(1, self.layout.expert_replicas * self.shards // self.layout.replicas)

    @property
    def is_short(self) -> bool:
        """Return whether fused sparse attention is dense: no query sees more keys than it may select."""
        return self.features.attention and self.sequence <= self.model.topk

    @property
    def absorbed(self) -> bool:
        """Return whether sparse attention is in absorbed form."""
        by_head = self.features.by_length and self.is_short and self.layout.cp == 1
        return self.model.sparse and self.features.absorb and not by_head

    @property
    def tokens(self) -> int:
        """Return the tokens of a microbatch on one context parallel rank, padding included."""
        return self.training.micro * self.sequence // self.layout.cp
