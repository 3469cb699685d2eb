"""Parts of DSA run by Megatron-core's own code (0.16 to 0.18), which allocates ``[s, s]`` buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.features.dsa.call import Call
from mindspeed_dsa.features.dsa.index_projection import indexer_arguments, projecting, run_tapped
from mindspeed_dsa.features.dsa.indexer_loss import coefficient
from mindspeed_dsa.features.dsa.main_attention import expanded_key
from mindspeed_dsa.features.dsa.model.indexer import heads_without_relu
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import Attended, IndexInputs, Parts, Selection


def parts_left_to_megatron(call: Call) -> Parts:
    """Return the parts that the call's options leave to Megatron's own code."""
    options, layer = call.options, call.layer
    if options.all_ours:
        return Parts()
    dsa = call.megatron("core.transformer.experimental_attention_variant.dsa")

    def choose() -> Selection:
        return choose_with_megatron(dsa, layer.indexer, *indexer_arguments(call))

    def attend(operands: Operands, topk_indices: Tensor) -> Attended:
        return attend_with_megatron(dsa, operands, topk_indices)

    def loss(operands: Operands, selection: Selection) -> Tensor:
        return megatron_loss(dsa, layer, operands, selection)

    return Parts(
        choose=None if options.indexer else choose,
        attend=None if options.attention else attend,
        loss=None if options.kl_loss else loss,
    )


def choose_with_megatron(dsa: Any, indexer: Any, x: Tensor, qr: Tensor) -> Selection:
    """Select keys with Megatron's own scores, a causal mask and ``torch.topk``. Allocates ``[b, s, s]``.

    Args:
        dsa: Megatron's ``dsa`` module.
        indexer: Megatron's ``DSAIndexer``.
        x: hidden states ``[sequence, batch, hidden]``, a rank's shard under sequence parallelism.
        qr: latent queries ``[sequence, batch, q_lora_rank]``, sharded like ``x``.
    """
    if hasattr(indexer, "forward_before_topk"):
        with projecting(indexer):
            query, key, weights = indexer.forward_before_topk(x, qr, None)
        inputs = IndexInputs.from_megatron(query, key, weights, indexer.config.dsa_indexer_scoring_relu)
        mask = causal_mask(inputs.query.shape[1], x.device)
        if not inputs.use_relu:
            query, weights = heads_without_relu(query, weights)
        scores, selected = dsa.fused_qk_topk_naive(query, key, weights, indexer.index_topk, mask)
    else:
        parallel = indexer.config.tensor_model_parallel_size if indexer.config.sequence_parallel else 1
        # x is a shard of the sequence, the mask covers all of it.
        mask = causal_mask(x.shape[0] * parallel, x.device)
        inputs, (scores, selected) = run_tapped(indexer, x, qr, mask, compute=True)
    topk_indices = canonical(selected)
    gathered = scores.gather(-1, topk_indices.clamp_min(0).long())  # [b, s, topk]
    # clamp_min read key 0 for the -1 entries: set their scores to -inf
    return Selection(topk_indices, gathered.masked_fill(topk_indices < 0, -torch.inf), inputs, scores)


def attend_with_megatron(dsa: Any, operands: Operands, topk_indices: Tensor) -> Attended:
    """Compute attention with Megatron's ``unfused_dsa_fn``. Allocates ``[b, heads, s, s]``."""
    query, key, value = operands.query, operands.key, operands.value
    if operands.absorbed:
        key = expanded_key(operands)  # [s, b, heads, latent + rope]
        value = key[..., : operands.latent]  # [s, b, heads, latent]
    out = dsa.unfused_dsa_fn(query, key, value, for_megatron(topk_indices), operands.softmax_scale)
    if operands.absorbed:
        # [s, b, heads * latent] -> [b, s, heads, latent]
        out = operands.up_projected(out.unflatten(-1, (query.shape[2], -1)).transpose(0, 1))
    return Attended(out)


def megatron_loss(dsa: Any, attention: Any, operands: Operands, selection: Selection) -> Tensor:
    """Compute the loss with Megatron's ``compute_dsa_indexer_loss``. Allocates ``[b, heads, s, s]``."""
    scores = selection.scores
    if scores is None:
        scores = megatron_scores(dsa, attention.indexer, selection.inputs)
    key = expanded_key(operands) if operands.absorbed else operands.key  # [s, b, heads, dim]
    loss: Tensor = dsa.compute_dsa_indexer_loss(
        scores,
        for_megatron(selection.topk_indices),
        operands.query.detach(),
        key.detach(),
        operands.softmax_scale,
        coefficient(attention.config),
        attention.config.dsa_indexer_use_sparse_loss,
        attention.indexer.pg_collection,
    )
    return loss


def megatron_scores(dsa: Any, indexer: Any, inputs: IndexInputs) -> Tensor:
    """Compute Megatron's scores of all query-key pairs ``[b, s, s]``, with future keys at -inf."""
    # [b, s, ...] -> [s, b, ...]
    query, weights = inputs.query.transpose(0, 1), inputs.weights.transpose(0, 1)
    key = inputs.key.transpose(0, 1)
    if hasattr(indexer, "_compute_index_scores"):
        scores = indexer._compute_index_scores(query, weights, key)
    else:
        # Scores of these releases always apply ReLU.
        if not inputs.use_relu:
            query, weights = heads_without_relu(query, weights)
        scores = dsa._compute_index_scores(query, weights, key)
    return scores + causal_mask(scores.shape[-1], scores.device)  # type: ignore[no-any-return]


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Return a mask ``[length, length]`` fp32: -inf above the diagonal, 0 elsewhere."""
    return torch.full((length, length), -torch.inf, dtype=torch.float32, device=device).triu_(1)


def canonical(chosen: Tensor) -> Tensor:
    """Convert a selection by Megatron, which pads with future keys, to the operators' format.

    Args:
        chosen: selected positions ``[b, s, topk]`` int64, in any order.

    Returns:
        Indices ``[b, s, topk]`` int32, ascending, -1 at the tail.
    """
    length = chosen.shape[1]
    row = torch.arange(length, device=chosen.device)[:, None]  # [s, 1]
    # Future keys become `length`, sort to the tail, and turn into -1.
    ordered = chosen.masked_fill(chosen > row, length).sort(dim=-1).values  # [b, s, topk]
    return ordered.masked_fill(ordered == length, -1).int()


def for_megatron(topk_indices: Tensor) -> Tensor:
    """Convert the operators' selection to int64 indices without -1, which Megatron can scatter."""
    # Unused entries repeat the row's first key. Megatron scatters a constant, so repeats do no harm.
    return torch.where(topk_indices < 0, topk_indices[..., :1], topk_indices).long()  # [b, s, topk]
