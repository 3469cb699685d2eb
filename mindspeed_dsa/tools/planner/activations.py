"""Estimate of the activations that a forward keeps for backward, with one entry per storage.

Sizes are for Megatron's own modules (``--transformer-impl local``): a norm keeps its input and the normalized
input in fp32, an activation function keeps each of its factors. Fused kernels keep only their inputs.

In formulas, ``t`` is the TP size, and ``n`` is a microbatch's number of tokens on a context parallel rank.
``r`` is ``n / t`` under sequence parallelism and else ``n``. ``e`` is the size of an activation element in
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from mindspeed_dsa.features.operators.linear_cross_entropy.feature import forms_in_forward
from mindspeed_dsa.tools.planner.job import Job, LayerKind

FLOAT, INDEX, LONG = 4, 4, 8


@dataclass(frozen=True)
class Kept:
    """One saved tensor, or several of the same kind.

    Attributes:
        part: part of the model, as in the report.
        nbytes: bytes on the rank.
        tags: names of features that free the tensor: values of ``--recompute-modules``, ``act``, ``norm``,
            and modules whose saved tensors ``--swap-attention`` moves (``attention``, ``input_norm``, ...).
        storages: number of equal storages over which the bytes are divided; swapping skips small storages.
    """

    part: str
    nbytes: float
    tags: frozenset[str] = field(default_factory=frozenset)
    storages: int = 1


# The chunked loss computes chunks of 512 MiB of fp32 logits, but of at least 256 tokens.
_CHUNK, _FEWEST_TOKENS = 512 * 2**20, 256


def in_forward(job: Job) -> bool:
    """Return whether the chunked loss computes the output projection's gradient in forward, and keeps it."""
    choice, number = job.features.chunked_loss, job.training.number
    return forms_in_forward(choice, _tokens_of_loss(job), job.model.hidden, number)


def _tokens_of_loss(job: Job) -> int:
    """Return the number of tokens for which a rank computes logits of its part of the vocabulary."""
    return job.tokens * job.vocabulary_ranks


def of_loss(job: Job) -> float:
    """Return the bytes of activations that output projection and loss keep; the input is not counted."""
    parts, hidden, tokens = job.layout.tp * job.vocabulary_ranks, job.model.hidden, _tokens_of_loss(job)
    vocabulary = job.model.vocabulary / parts
    if not job.features.chunked_loss:
        # The softmax in fp32; per token also a target mask (1 byte) and the masked target (8 bytes).
        return tokens * (vocabulary * FLOAT + 9)
    # The gathered input, then per token label, loss weight and log-sum-exp; then both gradients.
    gathers = job.layout.sequence or job.vocabulary_ranks > 1
    gathered = tokens * hidden * job.training.number if gathers else 0.0
    kept = gathered + tokens * (LONG + 2.0 * FLOAT)
    if in_forward(job):
        kept += tokens * hidden * job.training.number + vocabulary * hidden * FLOAT
    return kept


def logits_at_once(job: Job) -> float:
    """Return the bytes of logits that exist only temporarily, which :func:`of_loss` does not count."""
    tokens, number = _tokens_of_loss(job), job.training.number
    vocabulary = job.model.vocabulary / (job.layout.tp * job.vocabulary_ranks)
    if not job.features.chunked_loss:
        return number * tokens * vocabulary
    # Vocabulary 129280 / TP 8: 16160 x 4 bytes = 63 KiB a token, so a chunk has about 8300 tokens.
    chunk = min(tokens, max(_FEWEST_TOKENS, _CHUNK / (vocabulary * FLOAT)))
    return chunk * vocabulary * (FLOAT + (number if number < FLOAT else 0))


class Layer:
    """Activations that one transformer layer keeps for one microbatch.

    Args:
        job: planned job.
        kind: layer's kind.
    """

    def __init__(self, job: Job, kind: LayerKind) -> None:
        self.job, self.kind = job, kind
        self.model, self.training = job.model, job.training
        self.n = job.tokens
        self.r = self.n / (job.layout.tp if job.layout.sequence else 1)
        self.t, self.e = job.layout.tp, job.training.number
        self.length = job.sequence

    def items(self) -> list[Kept]:
        """Return all activations that the layer keeps without recomputation and swapping."""
        h, model = self.model.hidden, self.model
        kept = [*self._norm("input_norm", h, recomputed=True)]
        if not model.latent:
            kept += self._grouped_attention()
        elif model.sparse:
            kept += self._latent_projections()
            kept += self._fused_sparse() if self.job.features.attention else self._stock_sparse()
        else:
            kept += self._latent_projections()
            kept += self._dense_latent()
        kept.append(self._item("attention", self.n * model.heads * model.value_dim / self.t, "attention"))
        if self.training.dropout:  # one-byte masks of the outputs of attention and MLP
            kept.append(self._item("norms", 2 * self.r * h, size=1, storages=2))
        # In the layer spec of sparse attention, the norm before a dense MLP is fused into its first linear.
        kept += self._norm("post_attention_norm", h, recomputed=self.kind.experts or not model.sparse)
        return [*kept, *(self._moe() if self.kind.experts else self._mlp("dense MLP", model.ffn, ("mlp",)))]

    def _item(self, part: str, numbers: float, *tags: str, size: int = 0, storages: int = 1) -> Kept:
        return Kept(part, numbers * (size or self.e), frozenset(tags), storages)

    def _norm(self, name: str, width: int, recomputed: bool) -> Iterator[Kept]:
        tags = ("norm", "layernorm") if recomputed else ()
        swap = "attention" if name == "input_norm" else ""
        yield from norm_items(self.job, width, self.r, name, *tags)
        yield self._item("norms", width * self.r, *tags, *([swap] if swap else []))

    def _latent_projections(self) -> Iterator[Kept]:
        model, tag = self.model, "attention"
        if model.query_lora:
            yield from norm_items(self.job, model.query_lora, self.r, tag)
            yield self._item("attention", model.query_lora * self.r, tag)
        yield from norm_items(self.job, model.kv_lora, self.r, tag)
        angles = self.length / self.job.layout.cp * model.rope
        yield self._item("attention", 4 * angles, tag, storages=4)

    def _fused_sparse(self) -> Iterator[Kept]:
        model, n, t, tag = self.model, self.n, self.t, "attention"
        heads, core = model.heads / t, ("attention", "core_attn")
        up = (*core[:1], "mla_up_proj")
        # In absorbed form all heads share one key of 512 + 64 numbers.
        key = model.kv_lora + model.rope
        # Keys of the other CP ranks are gathered again for backward, unless --cp-keep-gathered keeps them.
        keys = n * (self.job.layout.cp if self.job.features.keep_gathered else 1)
        if self.job.absorbed:
            yield self._item("attention", n * heads * model.nope, *up)
            yield self._item("attention", n * heads * key, *up)
            yield self._item("attention", keys * key, *up)
            for _ in range(2):  # the output, and its copy by head for the value's projection
                yield self._item("attention", n * heads * model.kv_lora, tag, "core_attn")
            yield self._item("attention", heads * model.kv_lora * model.value, tag)
        else:
            # Dense kernels need values padded to the keys' width, and return outputs of that width.
            wide = model.query_dim if self.job.is_short else model.value
            yield self._item("attention", model.kv_lora * self.r, tag)
            yield self._item("attention", 2 * n * heads * model.query_dim, *up, storages=2)
            yield self._item("attention", 2 * n * heads * wide, *up, storages=2)
        yield self._item("attention", n * heads, *core, size=FLOAT)  # log-sum-exp
        if self.kind.selects:
            yield from self._index(keys)
        # Each layer that shares keeps a gradient of the scores; the selecting layer keeps these in any case.
        if self.job.has_served_losses and not self.kind.selects:
            yield self._item("indexer", n * model.topk, *core, size=FLOAT)

    def _index(self, keys: float) -> Iterator[Kept]:
        """Yield the tensors kept by the indexer's operators and, if it is trained, by its projections."""
        model, n, core = self.model, self.n, ("attention", "core_attn")
        # int32 topk_indices: 4096 tokens x 2048 x 4 bytes = 32 MiB a layer.
        if not self.job.is_short:  # layers that share a selection share its storage, too
            yield self._item("indexer", n * model.topk, *core, size=INDEX)
        if not model.index_loss:
            return
        if not self.job.is_short:  # the KL loss keeps a score for each selected key
            yield self._item("indexer", n * model.topk, *core, size=FLOAT)
        yield self._item("indexer", n * model.index_heads * model.index_dim, *core)
        yield self._item("indexer", keys * model.index_dim, *core)
        yield self._item("indexer", n * model.index_heads, *core)
        yield from self._index_projections()

    def _index_projections(self) -> Iterator[Kept]:
        model, n, core = self.model, self.n, ("attention", "core_attn")
        if self.job.layout.sequence:
            yield self._item("indexer", n * model.hidden, *core)
        if self.job.layout.sequence or self.e == 2:
            yield self._item("indexer", n * (model.query_lora or model.hidden), *core)
        yield self._item("indexer", n * (model.index_dim + 2), *core, storages=3)
        yield self._item("indexer", 4 * self.length / self.job.layout.cp * model.rope, *core, storages=4)

    def _stock_sparse(self) -> Iterator[Kept]:
        """Yield the tensors that Megatron's own DSA keeps: ``[s, s]`` matrices per head and indexer."""
        model, n, tag = self.model, self.n, "attention"
        # 4096 x 4096 x 16 heads x 4 bytes = 1 GiB of scores a layer, on TP 8.
        heads, core, square = model.heads / self.t, ("attention", "core_attn"), n * self.length
        yield self._item("attention", model.kv_lora * self.r, tag)
        yield self._item("attention", 2 * n * heads * model.query_dim, *core, size=FLOAT, storages=2)
        yield self._item("attention", n * heads * model.value, *core)
        yield self._item("attention", square * heads, *core, size=FLOAT)
        yield self._item("attention", square * heads, *core)
        yield self._item("indexer", square, *core, size=FLOAT)
        if not self.kind.selects:
            return
        yield self._item("indexer", n * min(model.topk, self.length), *core, size=LONG)
        if model.index_loss:
            numbers = n * model.index_dim * (model.index_heads + 1)
            yield self._item("indexer", numbers, *core, size=FLOAT, storages=2)
            yield self._item("indexer", square * (model.index_heads + 2), *core, size=FLOAT, storages=3)
            yield self._item("indexer", n * model.index_heads, *core)
            yield from self._index_projections()

    def _dense_latent(self) -> Iterator[Kept]:
        model, n, tag = self.model, self.n, "attention"
        heads, core = model.heads / self.t, ("attention", "core_attn")
        yield self._item("attention", n * heads * model.query_dim, tag, "mla_up_proj")
        if self.training.kernels:
            yield self._item("attention", model.kv_lora * self.r, tag)
            expanded = n * heads * (model.query_dim + model.value)
            yield self._item("attention", expanded, tag, "mla_up_proj", storages=2)
        else:
            yield self._item("attention", n * (model.kv_lora + model.rope), tag, "mla_up_proj")
        yield self._item("attention", n * heads, *core, size=FLOAT)

    def _grouped_attention(self) -> Iterator[Kept]:
        model, n, core = self.model, self.n, ("attention", "core_attn")
        # With fewer key heads than TP ranks, every rank still holds one.
        heads, groups = model.heads / self.t, max(1.0, model.kv_heads / self.t)
        yield self._item("attention", n * (heads + 2 * groups) * model.head_dim, "attention", storages=3)
        if self.training.flash:
            yield self._item("attention", n * heads, *core, size=FLOAT)
            return
        square = n * self.length * heads
        yield self._item("attention", square, *core)
        if self.training.attention_dropout:
            yield self._item("attention", square, *core)
            yield self._item("attention", square, *core, size=1)

    def _mlp(self, part: str, width: int, tags: tuple[str, ...]) -> list[Kept]:
        """Return the tensors that an MLP keeps from fc1's output on; its input is counted elsewhere."""
        tokens = self.n / self.t
        items = [self._item(part, (2 if self.model.gated else 1) * width * tokens, *tags)]
        if self.model.gated and not self.training.fused_glu:
            items.append(self._item(part, 2 * width * tokens, *tags, "act", storages=2))
        return [*items, self._item(part, width * tokens, *tags, "act")]

    def _moe(self) -> Iterator[Kept]:
        job, model, r, tag = self.job, self.model, self.r, "moe"
        topk = model.router_topk
        if model.shared_ffn:
            yield from self._mlp("shared experts", model.shared_ffn, (tag, "shared_experts"))
        if self.e == 2:  # the router works in float32
            numbers = r * model.hidden + model.experts * model.hidden
            yield self._item("router", numbers, tag, size=FLOAT, storages=2)
        yield self._item("router", r * (13 * model.experts + 28 * topk + 16), tag, size=1, storages=15)
        # Tokens that the rank's experts receive: EP balances them on average, ETP gathers them from its
        # ranks.
        received = r * topk * job.layout.etp * self.kind.skew
        width = model.expert_ffn / job.layout.etp
        part, act = "routed experts", (tag, "act", "moe_act")
        yield self._item(part, received * model.hidden, tag)
        yield self._item(part, (2 if model.gated else 1) * received * width, tag)
        yield self._item(part, received, tag, size=FLOAT)
        unfused = 3 if model.gated else 1  # both factors, and the product before the router's probability
        if not self.training.fused_glu:
            yield self._item(part, unfused * received * width, *act, storages=unfused)
        yield self._item(part, received * width, *act)
        if not job.features.permute_fusion:
            yield self._item(part, r * topk * model.hidden, tag)


def norm_items(job: Job, width: float, rows: float, *tags: str) -> Iterator[Kept]:
    """Yield the tensors that a norm keeps: input and rstd; in PyTorch's RMSNorm two fp32 copies."""
    one_kernel = job.training.kernels or job.model.layer_norm
    numbers = width * job.training.number if one_kernel else 2 * width * FLOAT
    yield Kept("norms", numbers * rows, frozenset(tags))
    # rstd of every token, and the mean in LayerNorm
    yield Kept("norms", FLOAT * rows * (1 + job.model.layer_norm), frozenset(tags))


def freed(items: Iterable[Kept], job: Job, norm: bool, act: bool, swap: float) -> list[Kept]:
    """Return the activations that stay in memory under recomputation and swapping.

    Args:
        items: layer's kept activations.
        job: planned job.
        norm: whether ``--recompute-norm`` covers the layer.
        act: whether ``--recompute-activation-function`` covers the layer.
        swap: share of the swappable bytes that ``--swap-attention`` moves; 0 if it does not cover the layer.
    """
    gone = set(job.training.modules) | ({"norm"} if norm else set()) | ({"act"} if act else set())
    modules = {"self_attention": "attention"}
    swapped = {modules.get(name, name) for name in job.features.swap_modules} if swap else set()
    left = []
    for item in items:
        # A swap leaves storages below --swap-attention-min-bytes (1 MiB) on the device.
        small = item.nbytes / item.storages < job.features.swap_least
        if item.tags & gone:
            continue
        stays = 1 - swap if item.tags & swapped and not small else 1.0
        if stays > 0:
            left.append(replace(item, nbytes=stays * item.nbytes))
    return left


def shared_selection(job: Job, kind: LayerKind) -> Kept:
    """Return ``topk_indices`` of a recomputed layer, which stay until backward if other layers share them."""
    if not kind.serves or job.is_short:
        return Kept("indexer", 0.0)
    stock = not job.features.attention
    keys = min(job.model.topk, job.sequence) if stock else job.model.topk
    size = (LONG if stock else INDEX) + FLOAT * job.has_served_losses  # keys, and their scores
    return Kept("indexer", float(job.tokens * keys * size))


def inputs_of_recomputed(job: Job, norm: bool, experts: bool) -> Kept:
    """Return the inputs of recomputed norms, which are kept instead of the outputs."""
    rows = job.tokens / (job.layout.tp if job.layout.sequence else 1)
    norms = (1 + (experts or not job.model.sparse)) if norm or "layernorm" in job.training.modules else 0
    return Kept("norms", norms * rows * job.model.hidden * job.training.number)


def by_part(items: Iterable[Kept]) -> dict[str, float]:
    """Return a dict from part of the model to the sum of its kept bytes."""
    sums: dict[str, float] = {}
    for item in items:
        sums[item.part] = sums.get(item.part, 0.0) + item.nbytes
    return sums
