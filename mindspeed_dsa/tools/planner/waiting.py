"""Memory that deferred weight gradients need: inputs of linear layers, and the gradients of their outputs.

Each storage counts once: layers with the same input share it, and a rank's experts have one storage for all
inputs and one for all output gradients. Weight gradients of norms, embeddings, routers and biases are not
deferred. Letters are as in ``activations.py``: ``t`` is the TP size, and ``n`` is a microbatch's number of
tokens on a context parallel rank. ``r`` is ``n / t`` under sequence parallelism and else ``n``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspeed_dsa.tools.planner.job import Job, LayerKind


def of_chunk(job: Job, rank: int, chunk: int, held: Sequence[int]) -> float:
    """Return the bytes held for one chunk's deferred weight gradients; 0 without split backwards.

    Args:
        job: planned job.
        rank: pipeline rank.
        chunk: chunk of the rank.
        held: numbers of the chunk's layers, from 0.
    """
    if not job.features.split:
        return 0.0
    found = sum(of_layer(job, job.kinds[number]) for number in held)
    return found + (of_end(job) if job.layout.ends(rank, chunk) else 0.0)


def of_layer(job: Job, kind: LayerKind) -> float:
    """Return the bytes held for the deferred weight gradients of one transformer layer."""
    return job.training.number * sum(_Numbers(job).layer(kind))


def of_end(job: Job) -> float:
    """Return the bytes held for the deferred weight gradients of output layer and multi-token prediction."""
    return job.training.number * sum(_Numbers(job).end())


class _Numbers:
    def __init__(self, job: Job) -> None:
        self.job, self.model = job, job.model
        self.n, self.t = job.tokens, job.layout.tp
        self.r = self.n / (job.layout.tp if job.layout.sequence else 1)

    def layer(self, kind: LayerKind) -> Iterator[float]:
        model = self.model
        yield self.r * model.hidden  # the norm's output, input of the projections
        if model.latent:
            yield from self._latents()
        else:
            yield self._by_columns((model.heads + 2 * model.kv_heads) * model.head_dim)
        if kind.selects and model.index_loss:
            yield from self._indexer()
        if self.job.features.sp_tp_sp:  # each rank has the full output projection, for its tokens
            yield self.r * (model.heads * model.value_dim + model.hidden)
        else:
            yield from self._by_rows(model.heads * model.value_dim)
        if not kind.experts:
            yield from self._mlp(model.ffn)
            return
        if model.shared_ffn:
            yield from self._mlp(model.shared_ffn)
        # --moe-alltoall-overlap-comm computes the experts' weight gradients in backward, to hide transfers.
        if not self.job.features.alltoall_overlap:
            received = self.r * model.router_topk * self.job.layout.etp * kind.skew
            yield received * (2 * model.hidden + self._widths * model.expert_ffn / self.job.layout.etp)

    @property
    def _widths(self) -> int:
        """Width of fc1's output plus width of fc2's input, in units of ``ffn``: 3 for a gated MLP, else 2."""
        return 3 if self.model.gated else 2

    def _by_columns(self, width: float) -> float:
        """Return the size of a column-parallel layer's output gradient, in elements."""
        return self.n * width / self.t

    def _by_rows(self, width: float) -> Iterator[float]:
        """Yield the sizes of a row-parallel layer's input shard and full output gradient, in elements."""
        yield self.n * width / self.t
        yield self.n * self.model.hidden

    def _latents(self) -> Iterator[float]:
        model = self.model
        if model.query_lora:
            yield 2 * self.r * model.query_lora  # gradient of the down-projection, and the norm's output
        yield self._by_columns(model.heads * model.query_dim)
        yield self.r * (model.kv_lora + model.rope)
        if not self.job.absorbed:  # the absorbed form has no up-projection as a layer
            yield self.r * model.kv_lora
            yield self._by_columns(model.heads * (model.nope + model.value))

    def _indexer(self) -> Iterator[float]:
        """Yield the sizes of the indexer's inputs and output gradients, which TP does not split."""
        model, half = self.model, self.job.training.number == 2
        if self.job.layout.sequence:
            yield self.n * model.hidden
        if self.job.layout.sequence or half:
            yield self.n * (model.query_lora or model.hidden)
        yield self.n * (model.index_heads * model.index_dim + model.index_dim + model.index_heads)

    def _mlp(self, width: float) -> Iterator[float]:
        yield self.r * self.model.hidden
        yield self._by_columns((self._widths - 1) * width)
        yield from self._by_rows(width)

    def end(self) -> Iterator[float]:
        model = self.model
        # If the output layer shares its weight with an embedding of the same chunk, its gradient is not
        # deferred.
        apart = not (self.job.features.chunked_loss or (model.tied and model.mtp))
        output = (self.r * model.hidden + self._by_columns(model.vocabulary)) if apart else 0.0
        yield (1 + model.mtp) * output
        for kind in self.job.mtp_kinds:
            yield self.r * 2 * model.hidden + self._by_columns(model.hidden)
            yield from self.layer(kind)
