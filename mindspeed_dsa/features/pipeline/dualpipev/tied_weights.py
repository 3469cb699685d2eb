"""The embedding weight and its copy in the model's last stage, both on the first rank.

The copy serves an output layer tied to the embedding, and multi-token prediction, which embeds tokens.
Megatron keeps it on the last rank, and an all-reduce keeps both equal. Here both are on one rank, so an
addition replaces the all-reduce.
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
    """Wrap ``default_embedding_ranks``: only the first rank has embeddings."""

    def default_embedding_ranks(pp_ranks: list[int], *_: Any) -> list[int]:
        return [pp_ranks[0]]

    return default_embedding_ranks


def copy_embedding(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``setup_embeddings_and_output_layer``, which leaves zeros in the copy: copy the embedding."""
    embedding: Any = None  # weak reference to the embedding of the chunk built last that has one

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
    """Wrap ``_allreduce_word_embedding_grads``: add the two gradients on the rank that has both."""

    def _allreduce_word_embedding_grads(model: list[Any], config: Any, *args: Any, **kwargs: Any) -> None:
        unwrap = context.megatron("core.utils").get_attr_wrapped_model
        chunks = [unwrap(chunk, "pre_process", return_model_obj=True) for chunk in model]
        weights = [chunk.shared_embedding_or_output_weight() for chunk in chunks]
        shared = [weight for weight in weights if getattr(weight, "shared_embedding", False)]
        both = [_gradient_of(weight) for weight in shared if weight.requires_grad]
        if len(both) == 2:
            both[0].add_(both[1])
            # Equal gradients keep the two copies equal.
            both[1].copy_(both[0])

    return _allreduce_word_embedding_grads


def _gradient_of(weight: Any) -> Tensor:
    """Return the gradient that the optimizer reads; for a DTensor, this rank's shard."""
    return local_of(weight.main_grad if hasattr(weight, "main_grad") else weight.grad)
