"""The five functions that Megatron asks Transformer Engine for, with its signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.permute_fusion.feature import Options
from mindspeed_dsa.ops.moe_permute import permute, sort_chunks, unpermute

Kernel = Callable[..., Any]


def fused_permute(context: Context[Options]) -> Kernel:
    """Make ``fused_permute``, or leave Transformer Engine's."""
    backend = context.options.backend

    def fused_permute(
        inp: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Permuted tokens ``[rows, hidden]`` and what :func:`fused_unpermute` takes."""
        moved = permute(inp, routing_map.bool(), None, **counts(inp, num_out_tokens), backend=backend)
        return moved.tokens, moved.row_map

    return _theirs(context, "fused_permute") or fused_permute


def fused_permute_with_probs(context: Context[Options]) -> Kernel:
    """Make ``fused_permute_with_probs``, or leave Transformer Engine's."""
    backend = context.options.backend

    def fused_permute_with_probs(
        inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Permuted tokens ``[rows, hidden]``, their probabilities ``[rows]``, and the map of rows."""
        return permute(inp, routing_map.bool(), probs, **counts(inp, num_out_tokens), backend=backend)

    return _theirs(context, "fused_permute_with_probs") or fused_permute_with_probs


def fused_unpermute(context: Context[Options]) -> Kernel:
    """Make ``fused_unpermute``, or leave Transformer Engine's."""
    backend = context.options.backend

    def fused_unpermute(
        inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, *, restore_shape: torch.Size
    ) -> Tensor:
        """``restore_shape``: the rows of every token, weighted and added up."""
        return unpermute(inp, row_id_map, restore_shape[0], merging_probs, backend=backend)

    return _theirs(context, "fused_unpermute") or fused_unpermute


def fused_sort_chunks_by_index(context: Context[Options]) -> Kernel:
    """Make ``fused_sort_chunks_by_index``, or leave Transformer Engine's."""
    backend = context.options.backend

    def fused_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
        """The chunks of ``inp`` in the order of ``sorted_index``."""
        return sort_chunks(inp, split_sizes, sorted_index, backend=backend)[0]

    return _theirs(context, "fused_sort_chunks_by_index") or fused_sort_chunks_by_index


def fused_sort_chunks_by_index_with_probs(context: Context[Options]) -> Kernel:
    """Make ``fused_sort_chunks_by_index_with_probs``, or leave Transformer Engine's."""
    backend = context.options.backend

    def fused_sort_chunks_by_index_with_probs(
        inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The chunks of both in the order of ``sorted_index``."""
        return sort_chunks(inp, split_sizes, sorted_index, probs, backend=backend)

    return _theirs(context, "fused_sort_chunks_by_index_with_probs") or fused_sort_chunks_by_index_with_probs


def counts(tokens: Tensor, num_out_tokens: int | Tensor | None) -> dict[str, int | None]:
    """What Megatron's count of rows says: how many, and how many for each token.

    A plain number is the tokens times the router's top-k, as long as no token is dropped; what a routing map
    was counted for comes as a tensor, on the host by then.
    """
    if num_out_tokens is None or num_out_tokens == -1:
        return {}
    rows = int(num_out_tokens)
    even = isinstance(num_out_tokens, int) and len(tokens) > 0 and rows % len(tokens) == 0
    return {"rows": rows, "topk": rows // len(tokens) if even else None}


def _theirs(context: Context[Options], name: str) -> Kernel | None:
    if not context.options.leaves_it_to_transformer_engine(context.megatron):
        return None
    theirs: Kernel = getattr(context.megatron("core.extensions.transformer_engine"), name)
    return theirs
