"""Tied embedding weights under DualPipeV, where both copies are on the first rank.

The model's last stage has a copy of the embedding weight, for a tied output layer and for multi-token
prediction. In Megatron this copy is on the last rank, and an all-reduce sums the two gradients. Here both
copies are on the first rank, so an addition replaces the all-reduce.
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


def embed_on_first_rank(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``initialize_model_parallel``: only the first pipeline rank has embedding weights."""

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        # Not by default_embedding_ranks: from 0.16 on, pretrain_gpt.py passes a function of its own.
        kwargs["get_embedding_ranks"] = lambda pp_ranks, *_: [pp_ranks[0]]
        original(*args, **kwargs)

    return initialize_model_parallel


def copy_embedding(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``setup_embeddings_and_output_layer``: copy the embedding to the last stage's zeroed weight."""
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
    """Wrap ``_allreduce_word_embedding_grads``: add the two copies' gradients on the first rank."""

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
    """Return the gradient that the optimizer reads; for a DTensor, its local shard."""
    return local_of(weight.main_grad if hasattr(weight, "main_grad") else weight.grad)
