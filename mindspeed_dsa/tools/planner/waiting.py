"""Operands that weight gradients wait with: inputs of linear layers, and the gradients of their outputs.

Of one chunk and microbatch, each storage once: layers that read the same input share it, and all experts of a
rank have theirs and the gradients of their outputs in one. Norms, embeddings, routers and biases have their
gradients in backward. Letters as in ``activations.py``: ``n`` tokens of a microbatch on a context parallel
rank, ``r`` of them where a sequence is cut over tensor parallel ranks too, ``t`` tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspeed_dsa.tools.planner.job import Job, LayerKind


def of_chunk(job: Job, rank: int, chunk: int, held: Sequence[int]) -> float:
    """Return the bytes of one backward's, where backwards are split; 0 where they are whole.

    Args:
        job: planned.
        rank: of the pipeline.
        chunk: of the rank.
        held: numbers of the chunk's layers, from 0.
    """
    if not job.features.split:
        return 0.0
    found = sum(of_layer(job, job.model.kinds[number]) for number in held)
    return found + (of_end(job) if job.layout.ends(rank, chunk) else 0.0)


def of_layer(job: Job, kind: LayerKind) -> float:
    """Return the bytes of one transformer layer's."""
    return job.training.number * sum(_Numbers(job).layer(kind))


def of_end(job: Job) -> float:
    """Return the bytes of the output layer's, and of multi-token prediction's."""
    return job.training.number * sum(_Numbers(job).end())


class _Numbers:
    def __init__(self, job: Job) -> None:
        self.job, self.model = job, job.model
        self.n, self.t = job.tokens, job.layout.tp
        self.r = self.n / (job.layout.tp if job.layout.sequence else 1)

    def layer(self, kind: LayerKind) -> Iterator[float]:
        model = self.model
        yield self.r * model.hidden  # the norm's output, which projections read
        if model.latent:
            yield from self._latents()
        else:
            yield self._by_columns((model.heads + 2 * model.kv_heads) * model.head_dim)
        if kind.selects and model.index_loss:
            yield from self._indexer()
        if self.job.features.sp_tp_sp:  # each rank has the whole projection for its rows
            yield self.r * (model.heads * model.value_dim + model.hidden)
        else:
            yield from self._by_rows(model.heads * model.value_dim)
        if not kind.experts:
            yield from self._mlp(model.ffn)
            return
        if model.shared_ffn:
            yield from self._mlp(model.shared_ffn)
        if not self.job.features.alltoall_overlap:  # whose backward hides their transfers
            received = self.r * model.router_topk * self.job.layout.etp * self.job.imbalance
            yield received * (2 * model.hidden + self._widths * model.expert_ffn / self.job.layout.etp)

    @property
    def _widths(self) -> int:
        """Widths of an MLP: of the first layer's output, both halves of it, and of the second one's input."""
        return 3 if self.model.gated else 2

    def _by_columns(self, width: float) -> float:
        """Gradient of the output of a layer that is cut by columns."""
        return self.n * width / self.t

    def _by_rows(self, width: float) -> Iterator[float]:
        """Input of a layer that is cut by rows, and the gradient of its output, which is whole."""
        yield self.n * width / self.t
        yield self.n * self.model.hidden

    def _latents(self) -> Iterator[float]:
        model = self.model
        if model.query_lora:
            yield 2 * self.r * model.query_lora  # of the projection down, and of the norm after it
        yield self._by_columns(model.heads * model.query_dim)
        yield self.r * (model.kv_lora + model.rope)
        if not self.job.absorbed:  # where attention reads the weight itself
            yield self.r * model.kv_lora
            yield self._by_columns(model.heads * (model.nope + model.value))

    def _indexer(self) -> Iterator[float]:
        """Copies of inputs, gradients of query, key and head weights, on every tensor parallel rank."""
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
        # An output layer that shares an embedding's weight in its chunk has its gradient in backward.
        apart = not (self.job.features.chunked_loss or (model.tied and model.mtp))
        output = (self.r * model.hidden + self._by_columns(model.vocabulary)) if apart else 0.0
        yield (1 + model.mtp) * output
        for kind in model.mtp_kinds:
            yield self.r * 2 * model.hidden + self._by_columns(model.hidden)
            yield from self.layer(kind)
