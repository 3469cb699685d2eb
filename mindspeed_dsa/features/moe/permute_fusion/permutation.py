"""Fused token permutations of Megatron, run by our operator instead of Transformer Engine's kernels.

The last unpermutation also adds the shared expert's output, which the layer passes to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.permute_fusion.feature import Options
from mindspeed_dsa.megatron.shared_expert import SharedOutput
from mindspeed_dsa.ops.moe_permute import permute, sort_chunks, unpermute

# -- permutations of moe_utils --------------------------------------------------------------------


def permute_fused(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``moe_utils.permute``: with ``fused=True``, run our operator."""
    if context.options.leaves_it_to_transformer_engine(context.megatron):
        return original
    backend = context.options.backend
    # Since 0.17 permute returns two more results, which serve Transformer Engine's padding.
    names_counts = "tokens_per_expert" in inspect.signature(original).parameters

    def permute_tokens(
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        num_out_tokens: int | Tensor | None = None,
        fused: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not fused:
            return original(tokens, routing_map, probs, num_out_tokens, fused, *args, **kwargs)
        padded = args[0] if args else kwargs.get("drop_and_pad", False)
        counted = counts(tokens, num_out_tokens)
        # Since 0.17 the allgather dispatcher passes no probs and an int for its slice of the routing map,
        # where the number of local experts differs from token to token: 8 experts on 2 ranks, top-2, may
        # give a token 0, 1 or 2 rows here. An int would otherwise mean the same number for every token.
        # With padding to capacity, rows / tokens is not top-k either.
        if padded or (names_counts and probs is None):
            counted["topk"] = None
        moved = permute(tokens, routing_map.bool(), probs, **counted, backend=backend)
        if not names_counts:
            return tuple(moved)
        tokens_per_expert = args[1] if len(args) > 1 else kwargs.get("tokens_per_expert")
        return *moved, None, tokens_per_expert

    return permute_tokens


def unpermute_fused(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``moe_utils.unpermute``: with ``fused=True``, run our operator.

    The operator also adds the shared expert's output, if the layer has put it into the session's slot.
    """
    if context.options.leaves_it_to_transformer_engine(context.megatron):
        return original
    backend, offer = context.options.backend, context.state(_Offer)

    def unpermute_tokens(
        permuted_tokens: Tensor,
        sorted_indices: Tensor,
        restore_shape: torch.Size,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        fused: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not fused:
            return original(
                permuted_tokens, sorted_indices, restore_shape, probs, routing_map, fused, *args, **kwargs
            )
        addend = offer.take(permuted_tokens, torch.Size(restore_shape))
        return unpermute(
            permuted_tokens, sorted_indices, restore_shape[0], probs, addend=addend, backend=backend
        )

    return unpermute_tokens


def sort_chunks_fused(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``moe_utils.sort_chunks_by_idxs``: with ``fused=True``, run our operator."""
    if context.options.leaves_it_to_transformer_engine(context.megatron):
        return original
    backend = context.options.backend

    def sort_chunks_by_idxs(
        input: Tensor,
        split_sizes: Tensor,
        sorted_idxs: Tensor,
        probs: Tensor | None = None,
        fused: bool = False,
    ) -> Any:
        if not fused:
            return original(input, split_sizes, sorted_idxs, probs, fused)
        return sort_chunks(input, split_sizes, sorted_idxs, probs, backend=backend)

    return sort_chunks_by_idxs


def counts(tokens: Tensor, num_out_tokens: int | Tensor | None) -> dict[str, int | None]:
    """Convert Megatron's ``num_out_tokens`` to the operator's arguments ``rows`` and ``topk``."""
    if num_out_tokens is None or num_out_tokens == -1:
        return {}
    # An int is tokens x top-k, as long as no token is dropped: 4096 tokens and top-8 give 32768. A tensor,
    # already on the host, counts the routing map and says nothing about topk.
    rows = int(num_out_tokens)
    even = isinstance(num_out_tokens, int) and len(tokens) > 0 and rows % len(tokens) == 0
    return {"rows": rows, "topk": rows // len(tokens) if even else None}


# -- the shared expert's output ------------------------------------------------------------------


def add_while_unpermuting(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap the ``MoELayer`` method that unpermutes and then adds the shared expert's output."""
    if context.options.leaves_it_to_transformer_engine(context.megatron):
        return original
    offer = context.state(_Offer)

    def combine(self: Any, output: Tensor, shared_expert_output: Tensor | SharedOutput | None) -> Tensor:
        # With a latent projection after the unpermutation the sum is in the latent size: no addend fits.
        latent = getattr(self.config, "moe_latent_size", None)
        if shared_expert_output is None or latent or not self.config.moe_permute_fusion:
            result: Tensor = original(self, output, shared_expert_output)
            return result
        # The unpermutation inside adds the offered output, unless the allgather dispatcher has unpermuted
        # before, or other code calls Megatron's unfused form.
        offer.addend = shared_expert_output
        try:
            result = original(self, output, None)
        finally:
            left, offer.addend = offer.addend, None
        return result if left is None else result + shared_expert_output

    return combine


class _Offer:
    """Slot in which a layer puts its shared expert's output, for the unpermutation to add."""

    def __init__(self, context: Context[Options]) -> None:
        self.addend: Tensor | SharedOutput | None = None

    def take(self, permuted: Tensor, shape: torch.Size) -> Tensor | None:
        """Take the tensor out of the slot, in ``shape``; ``None`` if there is none or it does not fit."""
        addend = self.addend.tensor if isinstance(self.addend, SharedOutput) else self.addend
        if addend is None or addend.dtype != permuted.dtype or addend.numel() != shape.numel():
            return None
        self.addend = None
        return addend.reshape(shape)


# -- functions of Transformer Engine's names ------------------------------------------------------

Kernel = Callable[..., Any]


def fused_permute(context: Context[Options]) -> Kernel:
    """Build ``fused_permute``, or return Transformer Engine's function."""
    backend = context.options.backend

    def fused_permute(
        inp: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return permuted tokens ``[rows, hidden]`` and the row map for :func:`fused_unpermute`."""
        moved = permute(inp, routing_map.bool(), None, **counts(inp, num_out_tokens), backend=backend)
        return moved.tokens, moved.row_map

    return _theirs(context, "fused_permute") or fused_permute


def fused_permute_with_probs(context: Context[Options]) -> Kernel:
    """Build ``fused_permute_with_probs``, or return Transformer Engine's."""
    backend = context.options.backend

    def fused_permute_with_probs(
        inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return permuted tokens ``[rows, hidden]``, their probabilities ``[rows]``, and the row map."""
        return permute(inp, routing_map.bool(), probs, **counts(inp, num_out_tokens), backend=backend)

    return _theirs(context, "fused_permute_with_probs") or fused_permute_with_probs


def fused_unpermute(context: Context[Options]) -> Kernel:
    """Build ``fused_unpermute``, or return Transformer Engine's."""
    backend = context.options.backend

    def fused_unpermute(
        inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, *, restore_shape: torch.Size
    ) -> Tensor:
        """Return the weighted sum of each token's rows, shaped ``restore_shape``."""
        return unpermute(inp, row_id_map, restore_shape[0], merging_probs, backend=backend)

    return _theirs(context, "fused_unpermute") or fused_unpermute


def fused_sort_chunks_by_index(context: Context[Options]) -> Kernel:
    """Build ``fused_sort_chunks_by_index``, or return Transformer Engine's."""
    backend = context.options.backend

    def fused_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
        """Return the chunks of ``inp`` in the order of ``sorted_index``."""
        return sort_chunks(inp, split_sizes, sorted_index, backend=backend)[0]

    return _theirs(context, "fused_sort_chunks_by_index") or fused_sort_chunks_by_index


def fused_sort_chunks_by_index_with_probs(context: Context[Options]) -> Kernel:
    """Build ``fused_sort_chunks_by_index_with_probs``, or return Transformer Engine's."""
    backend = context.options.backend

    def fused_sort_chunks_by_index_with_probs(
        inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the chunks of ``inp`` and ``probs`` in the order of ``sorted_index``."""
        return sort_chunks(inp, split_sizes, sorted_index, probs, backend=backend)

    return _theirs(context, "fused_sort_chunks_by_index_with_probs") or fused_sort_chunks_by_index_with_probs


def _theirs(context: Context[Options], name: str) -> Kernel | None:
    if not context.options.leaves_it_to_transformer_engine(context.megatron):
        return None
    theirs: Kernel = getattr(context.megatron("core.extensions.transformer_engine"), name)
    return theirs
