"""Embedding and output layer whose weights are divided among context parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.megatron import vocabulary_shards
from mindspeed_dsa.megatron.vocabulary_shards import VocabularyShard, shard_of
from mindspeed_dsa.parallel.local_shards import Cut, piece_of


def cut_vocabulary(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``GPTModel.__init__``: keep this context parallel rank's part of the vocabulary's weights."""

    # Megatron has drawn the weights of the whole tensor parallel rank, and copied tied weights to other
    # stages. So the parts equal the weights of a model without the feature.
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        embedding = getattr(self, "embedding", None)
        if embedding is not None:
            _cut_embedding(embedding.word_embeddings, context.megatron)
        head = getattr(self, "output_layer", None)
        if head is not None:
            _cut_head(head, context.megatron)

    return __init__


def _cut_embedding(layer: Any, megatron: Megatron) -> None:
    shard = _cut(layer.weight, layer.num_embeddings_per_partition, layer.vocab_start_index, megatron)
    layer.num_embeddings_per_partition //= shard.cut.pieces
    layer.vocab_start_index = shard.first
    layer.vocab_end_index = shard.first + layer.num_embeddings_per_partition


def _cut_head(layer: Any, megatron: Megatron) -> None:
    entries = layer.output_size_per_partition
    tensor_rank = megatron("core.parallel_state").get_tensor_model_parallel_rank()
    shard = _shard(entries, tensor_rank * entries, megatron)
    # Without a weight of its own, the layer is called with the embedding's.
    if layer.weight is not None:
        _cut(layer.weight, entries, tensor_rank * entries, megatron)
    layer.output_size_per_partition //= shard.cut.pieces
    layer.forward = _refuse_logits


def _refuse_logits(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "cp-shard-vocabulary: the model was asked for logits, and each context parallel rank has the logits "
        "of a part of the vocabulary; pass labels to get losses, or omit --cp-shard-vocabulary"
    )


def _shard(entries: int, first: int, megatron: Megatron) -> VocabularyShard:
    """Return this rank's part of ``entries`` vocabulary entries of a tensor parallel rank, from ``first``."""
    state = megatron("core.parallel_state")
    group = state.get_context_parallel_group()
    if entries % group.size():
        raise RuntimeError(
            f"cp-shard-vocabulary: {entries} vocabulary entries of a tensor parallel rank cannot be divided "
            f"among {group.size()} context parallel ranks; set --make-vocab-size-divisible-by to a multiple "
            f"of {group.size()}"
        )
    replica = state.get_data_parallel_rank(with_context_parallel=False)
    return VocabularyShard(
        first=first + group.rank() * (entries // group.size()),
        context_group=group,
        group=state.get_tensor_and_context_parallel_group(),
        cut=Cut(dim=0, index=group.rank(), pieces=group.size(), replica=replica),
    )


def _cut(weight: Any, entries: int, first: int, megatron: Megatron) -> VocabularyShard:
    """Shrink a weight ``[entries, hidden]`` in place to this rank's part, and mark it."""
    shard = _shard(entries, first, megatron)
    # The parameter stays the same object: other modules hold it, and Megatron has marked it.
    weight.data = weight.data.chunk(shard.cut.pieces)[shard.cut.index].clone()
    vocabulary_shards.mark(weight, shard)
    return shard


def look_up(original: Callable[..., Tensor], context: Context[None]) -> Callable[..., Tensor]:
    """Decorate ``VocabParallelEmbedding.forward``: look up the tokens of all context parallel ranks."""

    def forward(self: Any, input_: Tensor) -> Tensor:
        shard = shard_of(self.weight)
        if shard is None:
            return original(self, input_)
        mappings = context.megatron("core.tensor_parallel.mappings")
        # [batch, sequence] of this rank -> [ranks * sequence, batch].
        ids = vocabulary_shards.gathered(input_.t(), shard.context_group)
        rows = ids - shard.first
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        rows = rows.masked_fill(elsewhere, 0)
        if self.deterministic_mode:
            embedded = self.weight[rows]  # the backward of functional.embedding is not deterministic
        else:
            embedded = functional.embedding(rows, self.weight)
        embedded = embedded.masked_fill(elsewhere[..., None], 0)
        # One rank has found a token's embedding, so that the sums are exact.
        summed = vocabulary_shards.sum_rows(embedded, shard.context_group)  # [sequence, batch, hidden]
        if self.reduce_scatter_embeddings:
            part: Tensor = mappings.reduce_scatter_to_sequence_parallel_region(summed, group=self.tp_group)
            return part
        # Megatron's callers expect [batch, sequence, hidden] here.
        whole: Tensor = mappings.reduce_from_tensor_model_parallel_region(summed, group=self.tp_group)
        return whole.transpose(0, 1)

    return forward


def place_part(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``make_tp_sharded_tensor_for_checkpoint`` to give parts of the vocabulary their offsets."""

    def make(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sharded = original(tensor, *args, **kwargs)
        shard = shard_of(tensor)
        return sharded if shard is None else piece_of(sharded, shard.cut)

    return make
