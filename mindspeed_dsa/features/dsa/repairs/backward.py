"""Repairs of Megatron's backward pass and of saved optimizer state.

Imports Megatron only when called, because these functions are loaded while Megatron is being imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.key_exchange.layers import recomputes
from mindspeed_dsa.megatron.adapters import base_of, matrices_of
from mindspeed_dsa.megatron.indexer_loss import weighing_loss
from mindspeed_dsa.megatron.mla_projections import Projections, SumGradients

# -- core-attention-recompute: recompute the indexer as well --------------------------------


def leave_recompute_to_dsa(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.__init__`` to disable MLA's own checkpoint of a DSA core attention."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        dsa = context.megatron("core.transformer.experimental_attention_variant.dsa")
        if isinstance(self.core_attention, dsa.DSAttention):
            self.checkpoint_core_attention = False

    return __init__


def recompute_in_backward(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``DSAttention.forward`` to checkpoint it, including the indexer's inputs."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not (self.training and torch.is_grad_enabled() and recomputes(self.config)):
            return original(self, query, key, value, attention_mask, x, qr, *args, **kwargs)

        # The checkpointed forward runs without gradients and skips the indexer loss. Only the recomputation
        # computes it. The coefficient is the forward's, as the configuration's can change until then.
        weight = self.config.dsa_indexer_loss_coeff

        def run(query: Tensor, key: Tensor, value: Tensor, x: Tensor, qr: Tensor) -> Any:
            with weighing_loss(self.config, weight):
                return original(self, query, key, value, attention_mask, x, qr, *args, **kwargs)

        return context.megatron("core.tensor_parallel").checkpoint(run, False, query, key, value, x, qr)

    return forward


# -- gradients: averaged for the indexer, summed for the shared rotary key -----------------------


def average_over_tensor_parallel_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DSAIndexer.__init__``: have Megatron average its gradients over tensor parallel ranks."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # The indexer sees the gathered sequence, and its target is summed over all heads, so each rank has
        # the complete gradient. This attribute overrides sequence_parallel, which would sum the copies.
        for parameter in self.parameters():
            parameter.average_gradients_across_tp_domain = True

    return __init__


def reduce_adapters(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``DistributedDataParallel.__init__`` to reduce gradients of indexers' adapters, too.

    Adapters are added to a finished model, after its indexers have marked their weights.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        dsa = context.megatron("core.transformer.experimental_attention_variant.dsa")
        for indexer in self.modules():
            if isinstance(indexer, dsa.DSAIndexer):
                for name in ("linear_wq_b", "linear_wk", "linear_weights_proj"):
                    _reduce_like_base(name, getattr(indexer, name))

    return __init__


def _reduce_like_base(name: str, layer: Any) -> None:
    """Copy the marks of a replicated layer's weight to adapters that are replicated, too.

    Raises:
        ValueError: tensor parallel ranks split an adapter, and each applies it to tokens of its own.
    """
    weight = base_of(layer).weight
    marks = {mark: getattr(weight, mark, False) for mark in _MARKS}
    for down, up in matrices_of(layer):
        if down.weight.size(0) == up.weight.size(1) and up.weight.size(0) == weight.size(0):
            for parameter in (*down.parameters(), *up.parameters()):
                vars(parameter).update(marks)
        elif marks["sequence_parallel"] and not marks["average_gradients_across_tp_domain"]:
            raise ValueError(
                f"dsa-repairs: tensor parallel ranks split the adapter of the indexer's {name}, and under "
                "context parallelism each applies it to tokens of its own; leave it out of the adapter's "
                "target modules, or use adapters that are replicated (mcore-bridge, ms-swift)"
            )


_MARKS = ("average_gradients_across_tp_domain", "sequence_parallel")
"""Attributes of parameters by which Megatron reduces gradients over tensor parallel ranks."""


def sum_rotary_key_gradients(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.__init__`` to sum the rotary key's gradient over tensor parallel ranks.

    All heads share one rotary key, and each rank computes only the gradient from its own heads. Megatron sums
    these gradients with a reduce-scatter if the down projection is replicated and applied to sequence shards.
    In all other cases it does not sum them, and replicas of the projection drift apart.

    If the projection is split over ranks, the wrapper gathers its output. Megatron then continues as with a
    replicated projection, and under sequence parallelism its reduce-scatter computes the sum.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config, group = self.config, self.pg_collection.tp
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        is_full_copy = self.linear_kv_down_proj.weight.size(0) == sum(sizes)
        if group.size() == 1 or (config.sequence_parallel and is_full_copy):
            return
        mappings = context.megatron("core.tensor_parallel.mappings")

        attention = ref(self)

        def sum_in_backward(module: Any, inputs: Any, output: Any) -> Any:
            layer: Any = attention()
            if layer.linear_kv_down_proj is not module:
                raise ValueError(
                    "dsa-repairs: linear_kv_down_proj has an adapter, whose part of the rotary key's "
                    "gradient no tensor parallel rank would sum; add --sequence-parallel, or leave "
                    "linear_kv_down_proj out of the adapter's target modules"
                )
            # [s, b, kv_lora_rank + qk_pos_emb_head_dim]. Split projections return a slice of the last
            # dimension for the whole sequence, replicated ones the full dimension for a shard of the
            # sequence.
            projected = output[0]
            if not is_full_copy:
                projected = mappings.gather_from_tensor_model_parallel_region(projected, group=group)
                if config.sequence_parallel:
                    projected = mappings.scatter_to_sequence_parallel_region(projected, group=group)
            if not config.sequence_parallel:
                # The latent part's gradient is already summed at its up-projection.
                latent, rotary_key = projected.split(sizes, dim=-1)
                projected = torch.cat([latent, SumGradients.apply(rotary_key, group)], dim=-1)
            return (projected, *output[1:])

        self.linear_kv_down_proj.register_forward_hook(sum_in_backward)

    return __init__


# -- absorbed-adapters: weights that are read, not called ------------------------------------------


def fold_adapters(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate ``AbsorbedMLASelfAttention._get_kv_up_weights`` to include adapters of the up-projection."""

    def _get_kv_up_weights(self: Any) -> tuple[Tensor, Tensor]:
        if base_of(self.linear_kv_up_proj) is self.linear_kv_up_proj:
            return original(self)  # type: ignore[no-any-return]
        remedy = "leave linear_kv_up_proj out of the adapter's target modules"
        return Projections(self, context.megatron).up_projections("dsa-repairs", remedy)

    return _get_kv_up_weights


# -- padded-buckets: offsets in the saved optimizer state -----------------------------------------


def cut_without_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DistributedOptimizer.sharded_param_state_fully_reshardable`` to correct parameter offsets.

    Megatron concatenates a buffer's buckets without the padding at their ends, but slices parameters at
    offsets that include this padding. The wrapper subtracts the padding, as Megatron-LM's main branch does.
    """

    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        places = [(buffer, buffer.param_index_map) for buffer in self.buffers]
        for buffer, padded in places:
            # Bucket i starts after the padding of buckets 0..i-1: paddings 3, 5 -> offsets shift by 0, 3, 8.
            paddings = (bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets)
            before = [0, *itertools.accumulate(paddings)]
            buffer.param_index_map = {
                parameter: (start - before[bucket], end - before[bucket], bucket)
                for parameter, (start, end, bucket) in padded.items()
            }
        try:
            return original(self, *args, **kwargs)
        finally:
            for buffer, padded in places:
                buffer.param_index_map = padded

    return sharded_param_state_fully_reshardable
