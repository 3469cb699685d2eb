"""The embedding's weight and its copy in the chunk that ends the model, both on the first rank.

Megatron keeps the copy on the last rank, and an all-reduce keeps both alike: for an output layer that shares
the embedding's weight, and for multi-token prediction, which embeds tokens. Here both are on one rank, and an
addition does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.pipeline.dualpipev.feature import Options
from mindspeed_dsa.parallel.local_shards import local_of


def embed_on_first_rank(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Decorate ``default_embedding_ranks``."""

    def default_embedding_ranks(pp_ranks: list[int], *_: Any) -> list[int]:
        return [pp_ranks[0]]

    return default_embedding_ranks


def copy_embedding(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``setup_embeddings_and_output_layer``, after which the copy holds zeros."""
    embedding: Any = None  # reference to that of the model chunk that was built last with one of its own

    def setup_embeddings_and_output_layer(self: Any) -> None:
        nonlocal embedding
        original(self)
        if self.config.pipeline_model_parallel_size == 1:
            return
        if self.pre_process:
            embedding = ref(self.embedding.word_embeddings)
            return
        weight = self.shared_embedding_or_output_weight()
        if getattr(weight, "shared_embedding", False):
            with torch.no_grad():
                weight.copy_(embedding().weight)

    return setup_embeddings_and_output_layer


def add_gradients(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``_allreduce_word_embedding_grads``: the rank that has both adds them up."""

    def _allreduce_word_embedding_grads(model: list[Any], config: Any, *args: Any, **kwargs: Any) -> None:
        unwrap = context.megatron("core.utils").get_attr_wrapped_model
        chunks = [unwrap(chunk, "pre_process", return_model_obj=True) for chunk in model]
        weights = [chunk.shared_embedding_or_output_weight() for chunk in chunks]
        shared = [weight for weight in weights if getattr(weight, "shared_embedding", False)]
        both = [_gradient_of(weight) for weight in shared if weight.requires_grad]
        if len(both) == 2:
            both[0].add_(both[1])
            both[1].copy_(both[0])

    return _allreduce_word_embedding_grads


def _gradient_of(weight: Any) -> Tensor:
    """Return where the optimizer finds a weight's gradient; of a shard, this rank's piece."""
    return local_of(weight.main_grad if hasattr(weight, "main_grad") else weight.grad)
