"""Description of a job for the planner: model sizes, parallel layout, training settings and features."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from mindspeed_dsa.context_parallel.padding import padded_length
from mindspeed_dsa.megatron.batches import GLOBAL, SCHEDULE
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.tools.planner.routing import Routing


class LayerKind(NamedTuple):
    """Properties of a layer that change a plan.

    Attributes:
        experts: whether the MLP is a mixture of experts.
        selects: whether the layer has an indexer, which selects keys.
        serves: whether following layers reuse the keys that this layer selects.
        skew: number of tokens on the expert parallel rank with the most tokens, over the mean of all.
    """

    experts: bool
    selects: bool = False
    serves: bool = False
    skew: float = 1.0


EVERY_LAYER = Sharing()
"""Sharing in models without shared selections: every layer selects its own keys."""


@dataclass(frozen=True)
class Model:
    """Sizes of a GPT model, as in Megatron's flags.

    Attributes:
        vocabulary: padded vocabulary size.
        pattern: bool per layer, true if the layer has experts.
        gated: whether MLPs use SwiGLU, which doubles the width of the first matrix.
        bias: whether linear layers have a bias.
        qkv_bias: whether the projection to query, key and value has a bias.
        layer_norm: whether norms are LayerNorm, with a bias, instead of RMSNorm.
        query_lora: ``q_lora_rank``; 0 for a direct query projection.
        latent: whether attention is MLA; otherwise ``head_dim`` and ``kv_heads`` apply.
        sparse: whether attention is DeepSeek Sparse Attention.
        sharing: layers that select keys, and layers that reuse them.
        mtp: number of multi-token prediction layers.
        words: vocabulary size before padding; 0 if the padded size is fixed for all layouts.
        multiple: ``make_vocab_size_divisible_by``; times the TP size, it divides the padded size.
        router_groups: number of the router's groups of experts; 0 without groups.
        group_topk: number of groups that a token's experts come from.
        neighbours: whether a token's experts are consecutive, as with the faked routing of some benchmarks.
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
    router_groups: int = 0
    group_topk: int = 0
    neighbours: bool = False
    expert_bias: bool = False
    mtp: int = 0
    words: int = 0
    multiple: int = 1

    def padded(self, tp: int) -> Model:
        """Return the model with its embedding padded for ``tp`` tensor parallel ranks."""
        step = self.multiple * tp
        # `words` is 0 if the job fixes the padded size, which then stays.
        rows = math.ceil(self.words / step) * step or self.vocabulary
        return self if rows == self.vocabulary else replace(self, vocabulary=rows)

    @property
    def routing(self) -> Routing:
        """Settings that decide where a token is sent."""
        numbers = (self.experts, self.router_topk, self.router_groups, self.group_topk)
        return Routing(*numbers, self.neighbours)

    @property
    def query_dim(self) -> int:
        """Size of one head's query and key."""
        return self.nope + self.rope if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Size of one head's value."""
        return self.value if self.latent else self.head_dim

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each decoder layer."""
        selects = [self.sharing.computes(layer) for layer in range(1, self.layers + 1)]
        return self._kinds(self.pattern, selects)

    @cached_property
    def mtp_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each multi-token prediction layer; its MLP has the kind of the last decoder layer."""
        selects = [self.sharing.mtp_computes(layer) for layer in range(1, self.mtp + 1)]
        return self._kinds(self.pattern[-1:] * self.mtp, selects)

    def _kinds(self, experts: tuple[bool, ...], selects: list[bool]) -> tuple[LayerKind, ...]:
        if not self.sparse:
            return tuple(LayerKind(each) for each in experts)
        # A layer's keys are shared if the next layer does not select its own.
        above = (*selects[1:], True)[: len(selects)]
        serves = [own and not other for own, other in zip(selects, above, strict=True)]
        return tuple(map(LayerKind, experts, selects, serves))

    @property
    def selecting(self) -> tuple[int, ...]:
        """Numbers, from 1, of the decoder layers that select keys."""
        return tuple(number for number, kind in enumerate(self.kinds, start=1) if kind.selects)


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a job: group sizes, and the split of the layers into pipeline stages.

    Attributes:
        cp_algorithm: value of ``--cp-comm-type``, for dense attention.
        group: value of ``--microbatch-group-size-per-virtual-pipeline-stage``.
        first: number of layers on the first pipeline rank, or None for an even split; likewise ``last``.
        embedding_counts: whether the embedding counts as a layer in the split; likewise ``loss_counts``.
        stages: letters of each chunk in ``--pipeline-model-parallel-layout``; empty without the flag.
        v_shaped: whether second chunks are on the ranks in reverse order, as in DualPipeV.
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
        """Number of devices that the layout uses, one per rank."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def replicas(self) -> int:
        """Number of ranks with the same dense weights: data and context parallel ranks."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Number of ranks with the same routed experts."""
        # 64 devices, PP 4, EP 8, ETP 1: every expert is on 64 / 32 = 2 ranks.
        return max(1, self.devices // (self.pp * self.ep * self.etp))

    @property
    def rows(self) -> int:
        """Number of equal parts into which context and sequence parallelism split a sequence."""
        return self.cp * (self.tp if self.sequence else 1)

    @property
    def end(self) -> int:
        """Pipeline rank with the output layer and the loss, in its last chunk."""
        return 0 if self.v_shaped else self.pp - 1

    def ends(self, rank: int, chunk: int) -> bool:
        """Return whether a rank's chunk is the model's last pipeline stage."""
        return rank == self.end and chunk == self.vpp - 1

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage number of a rank's chunk, counted in forward order from 0."""
        # In a V of PP 4, rank 1 has stages 1 and 8 - 1 - 1 = 6.
        if self.v_shaped and chunk:
            return 2 * self.pp - 1 - rank
        return chunk * self.pp + rank

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a stage."""
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
    """Batch sizes, precisions, optimizer and Megatron's own recomputation.

    Attributes:
        kernels: whether norms, activation functions and attention use fused kernels, which keep only their
            inputs for backward.
        fused_glu: whether the gated activation keeps only its input for backward.
        full: number of layers per chunk with full recomputation; -1 for all.
        full_group: number of consecutive layers that are recomputed from one kept input.
        modules: modules of selective recomputation.
        flash: whether attention recomputes its probabilities in backward instead of keeping them.
        flex: whether experts' tokens travel once per rank (``--moe-token-dispatcher-type flex``).
        masters: bytes of a parameter's master weight, if weights are in bf16.
        moments: bytes of a parameter's two moments.
        graphs: whether CUDA graphs launch kernels.
        fp8: whether matrix products are in fp8.
        stored: whether weights of these products are stored in fp8 (``--fp8-param-gather``).
        gathers: whether ranks also gather them in fp8 after a step.
        dropout: whether embedding and outputs of attention and MLP have dropout.
        attention_dropout: whether attention's probabilities have dropout.
        grad_half: whether gradient buffers have 2-byte instead of 4-byte elements.
        schedule: sizes of ``--step-batch-size-schedule``; the plan is for the largest.
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
    flex: bool = False
    masters: int = 4
    moments: int = 8
    graphs: bool = False
    fp8: bool = False
    stored: bool = False
    gathers: bool = False
    dropout: bool = False
    attention_dropout: bool = False
    schedule: tuple[int, ...] = ()

    @property
    def batches(self) -> tuple[int, ...]:
        """Global batch sizes, in the order of the steps."""
        return self.schedule or (self.batch,)

    @property
    def batch_flag(self) -> str:
        """Flag for the batch sizes, with its value."""
        words = " ".join(map(str, self.batches))
        return f"sizes {words} in {SCHEDULE}" if self.schedule else f"{GLOBAL} {words}"

    @property
    def number(self) -> int:
        """Size of an activation element in bytes."""
        return 2 if self.bf16 else 4

    @property
    def grad_number(self) -> int:
        """Size of an element of Megatron's gradient buffers in bytes."""
        return 2 if self.grad_half else 4


@dataclass(frozen=True)
class Sharding:
    """Sharding of dense weights, their gradients and optimizer state (``--use-torch-fsdp2``, TorchTitan).

    Attributes:
        ranks: number of ranks over which weights are sharded; 0 for all data and context parallel ranks.
        prefetch: number of layers whose weights are gathered ahead of the running layer.
        experts: whether routed experts are also sharded, over the ranks that hold the same experts.
        weight: bytes of a number of the shards, which the optimizer updates without master weights; 0 for
            the size of activations, with master weights.
        stays: whether gathered weights stay from forward to backward.
        whole: whether gradients stay whole until the step's last microbatch, and gathered weights from
            backward to the next forward.
    """

    ranks: int = 0
    prefetch: int = 1
    experts: bool = False
    weight: int = 0
    stays: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Features:
    """Values of the features' flags that change a plan.

    Attributes:
        by_length: whether sequences of at most ``topk`` tokens use the naive instead of the absorbed form.
        virtual: GiB of optimizer moments in mapped host memory, per pipeline rank, or one value for all; inf
            moves all moments.
        norm_layers: number of layers per rank with recomputed norms; None for all. Likewise ``act_layers``
            and ``swap_layers``.
        swap_auto: whether to swap only as many activations as can be copied during computation.
        swap_bytes: largest number of swapped bytes on the host at one time, per rank.
        swap_shares: share of the swappable bytes that each pipeline rank swaps; empty for all.
        pairs: whether forward and backward of two microbatches overlap (``--moe-fb-overlap``).
        split: whether weight gradients are deferred, that is, computed apart from the backward.
        waiting: number of deferred weight gradients per rank; None means that pipeline rank r defers r.
        chunked_loss: pass that computes the output projection's gradient: ``auto``, ``forward`` or
            ``backward``; empty without chunked loss.
        served_losses: whether layers that share a selection have an indexer loss.
        divided_vocabulary: whether context parallel ranks divide the weights of embedding and output layer.
    """

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
    keep_gathered: bool = False
    warmup_stage: bool = False
    chunked_loss: str = ""
    served_losses: bool = False
    divided_vocabulary: bool = False


@dataclass(frozen=True)
class Job:
    """Job to plan.

    Attributes:
        imbalance: number of tokens on the expert parallel rank with the most tokens, over the mean of all;
            used where ``imbalances`` is empty.
        imbalances: the same for each decoder layer, then for each layer of multi-token prediction; 1 for
            layers without experts.
        sharding: FSDP settings; None without FSDP.
        notes: remarks on effects that the plan ignores.
        balancing: kind of balancing that the imbalance is usual for; empty if the imbalance was given.
    """

    model: Model
    layout: Layout
    training: Training
    features: Features = Features()
    imbalance: float = 1.0
    sharding: Sharding | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)
    balancing: str = field(default="", compare=False)
    imbalances: tuple[float, ...] = ()

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each decoder layer, with its imbalance."""
        return self._skewed(self.model.kinds, 0)

    @cached_property
    def mtp_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each multi-token prediction layer, with its imbalance."""
        return self._skewed(self.model.mtp_kinds, self.model.layers)

    def _skewed(self, kinds: tuple[LayerKind, ...], before: int) -> tuple[LayerKind, ...]:
        # Without expert parallelism each rank has all experts.
        if self.layout.ep == 1:
            return kinds
        skews = self.imbalances[before:] or (self.imbalance,) * len(kinds)
        return tuple(
            kind._replace(skew=skew) if kind.experts else kind
            for kind, skew in zip(kinds, skews, strict=False)
        )

    @property
    def skew(self) -> float:
        """Largest imbalance of a layer: 1 if each rank has all experts."""
        return max((kind.skew for kind in (*self.kinds, *self.mtp_kinds)), default=1.0)

    @property
    def microbatches(self) -> int:
        """Number of microbatches per step and data parallel rank."""
        return self.training.batch // (self.training.micro * self.layout.dp)

    @property
    def sequence(self) -> int:
        """Sequence length, padded to a multiple of :attr:`Layout.rows`."""
        parts = self.layout.tp if self.layout.sequence else 1
        return padded_length(self.training.sequence, self.layout.cp, parts)

    @property
    def shards(self) -> int:
        """Number of ranks over which the dense weights are sharded; 1 without FSDP."""
        return 1 if self.sharding is None else self.sharding.ranks or self.layout.replicas

    @property
    def expert_shards(self) -> int:
        """Number of ranks over which the routed experts are sharded; 1 without FSDP."""
        if self.sharding is None or not self.sharding.experts:
            return 1
        # The same share of the replicas as for dense weights.
        return max(1, self.layout.expert_replicas * self.shards // self.layout.replicas)

    @property
    def casts(self) -> bool:
        """Whether layers compute on copies of sharded weights, in another dtype."""
        return self.sharding is not None and self.sharding.weight not in (0, self.training.number)

    @property
    def vocabulary_ranks(self) -> int:
        """Number of context parallel ranks that share one copy of embedding and output weights."""
        return self.layout.cp if self.features.divided_vocabulary else 1

    @property
    def has_served_losses(self) -> bool:
        """Whether layers that share a selection have an indexer loss on the selected keys."""
        return self.features.served_losses and self.model.index_loss and not self.is_short

    @property
    def is_short(self) -> bool:
        """Whether fused sparse attention runs as dense attention: no query sees more than ``topk`` keys."""
        return self.features.attention and self.sequence <= self.model.topk

    @property
    def absorbed(self) -> bool:
        """Whether sparse attention uses the absorbed form."""
        by_head = self.features.by_length and self.is_short and self.layout.cp == 1
        return self.model.sparse and self.features.absorb and not by_head

    @property
    def tokens(self) -> int:
        """Number of a microbatch's tokens on one context parallel rank, with padding."""
        return self.training.micro * self.sequence // self.layout.cp
