"""Compared computation: part of a layer, from queries and latents to output, loss and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.released import INDEX_DIM, LATENT, ROPE, Released
from mindspeed_dsa.ops.indexer_kl_loss import indexer_kl_loss
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.by_head import is_faster_by_head, sparse_attention_by_head

# Bound on the deviation between both sides, relative to a result's largest value.
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Sizes:
    """Problem sizes; by default head, latent and hidden widths of DeepSeek-V3.2."""

    length: int = 4096
    heads: int = 16
    index_heads: int = 16
    topk: int = 512
    nope_dim: int = 128
    rope_dim: int = ROPE
    value_dim: int = 128
    latent_dim: int = LATENT
    index_dim: int = INDEX_DIM
    hidden_dim: int = 7168
    query_rank: int = 1536

    @classmethod
    def of(cls, model: Released, **others: int) -> Sizes:
        """Return a released model's sizes, with ``others`` replaced."""
        whole = {
            "heads": model.heads,
            "index_heads": model.index_heads,
            "topk": model.topk,
            "nope_dim": model.nope,
            "value_dim": model.value,
            "hidden_dim": model.hidden,
            "query_rank": model.query_rank,
        }
        return cls(**{**whole, **others})

    @property
    def softmax_scale(self) -> float:
        """Softmax scale of the main attention, for unabsorbed heads."""
        return float((self.nope_dim + self.rope_dim) ** -0.5)

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of key plus value: unabsorbed per head, and absorbed."""
        return self.nope_dim + self.rope_dim + self.value_dim, 2 * self.latent_dim + self.rope_dim

    @property
    def visible_pairs(self) -> int:
        """Number of visible (query, key) pairs."""
        return self.length * (self.length + 1) // 2

    @property
    def selected_pairs(self) -> int:
        """Number of selected (query, key) pairs."""
        # Row t sees t + 1 keys: the first topk rows select all of them, each later row topk.
        topk = min(self.topk, self.length)
        return topk * (topk + 1) // 2 + (self.length - topk) * topk


@dataclass(frozen=True)
class Inputs:
    """Inputs of both sides, in Megatron's layout ``[length, batch = 1, ...]``; all require gradients."""

    q_nope: Tensor
    """``[length, 1, heads, nope_dim]``"""
    q_rope: Tensor
    """``[length, 1, heads, rope_dim]``"""
    latent: Tensor
    """``[length, 1, latent_dim]``"""
    key_rope: Tensor
    """``[length, 1, rope_dim]``"""
    up_key: Tensor
    """``[heads, nope_dim, latent_dim]``"""
    up_value: Tensor
    """``[heads, value_dim, latent_dim]``"""
    index_query: Tensor
    """``[length, 1, index_heads, index_dim]``"""
    index_key: Tensor
    """``[length, 1, index_dim]``"""
    index_weights: Tensor
    """``[length, 1, index_heads]``, including all scales."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """All inputs, in order."""
        return tuple(vars(self).values())

    @property
    def of_attention(self) -> tuple[Tensor, ...]:
        """Inputs of the main attention, in order."""
        return self.q_nope, self.q_rope, self.latent, self.key_rope, self.up_key, self.up_value


@dataclass(frozen=True)
class Step:
    """Results of one forward and backward."""

    out: Tensor
    """``[length, 1, heads * value_dim]``"""
    loss: Tensor
    """Indexer loss, a scalar."""
    topk_indices: Tensor
    """``[1, length, topk]``"""
    gradients: tuple[Tensor, ...]
    """Gradients in the order of :attr:`Inputs.leaves`."""


def make_inputs(sizes: Sizes, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Inputs, Tensor]:
    """Return random inputs, and a gradient of the output ``[length, 1, heads * value_dim]``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).requires_grad_()

    length, heads, index_heads = sizes.length, sizes.heads, sizes.index_heads
    inputs = Inputs(
        normal(length, 1, heads, sizes.nope_dim),
        normal(length, 1, heads, sizes.rope_dim),
        normal(length, 1, sizes.latent_dim),
        normal(length, 1, sizes.rope_dim),
        normal(heads, sizes.nope_dim, sizes.latent_dim, scale=sizes.latent_dim**-0.5),
        normal(heads, sizes.value_dim, sizes.latent_dim, scale=sizes.latent_dim**-0.5),
        normal(length, 1, index_heads, sizes.index_dim),
        normal(length, 1, sizes.index_dim),
        normal(length, 1, index_heads, scale=(index_heads * sizes.index_dim) ** -0.5),
    )
    return inputs, normal(length, 1, heads * sizes.value_dim).detach()


def fused_step(inputs: Inputs, grad_out: Tensor, sizes: Sizes) -> Step:
    """Run this library's operators, with attention in the faster form."""
    index = [x.transpose(0, 1) for x in (inputs.index_query, inputs.index_key, inputs.index_weights)]
    topk_indices, topk_scores = lightning_indexer(*index, sizes.topk)
    attend = _absorbed
    if is_faster_by_head(inputs.latent.device, sizes.length, sizes.topk, sizes.heads, sizes.widths):
        attend = _by_head
    out, query, key, attention_sum = attend(inputs, sizes, topk_indices)
    loss = indexer_kl_loss(
        *index,
        query,
        key,
        topk_indices,
        sizes.softmax_scale,
        topk_scores=topk_scores,
        attention_sum=attention_sum,
    )
    del query, key
    return _finish(inputs, grad_out, out.reshape(sizes.length, 1, -1), loss, topk_indices)


def _by_head(inputs: Inputs, sizes: Sizes, topk_indices: Tensor) -> tuple[Tensor, ...]:
    """Run attention by head.

    Returns:
        Output ``[length, 1, heads, value_dim]``, then query, key and attention sum for the loss.
    """
    query, key, value = (x.transpose(0, 1) for x in projected(inputs, sizes))
    out, attention_sum = sparse_attention_by_head(
        query, key, value, topk_indices, sizes.softmax_scale, return_attention_sum=True
    )
    assert attention_sum is not None
    # Given the attention sum, the loss reads no key.
    return out.transpose(0, 1), query.detach(), key.detach()[:, :, 0], attention_sum


def _absorbed(inputs: Inputs, sizes: Sizes, topk_indices: Tensor) -> tuple[Tensor, ...]:
    """Run absorbed attention; same results as :func:`_by_head`."""
    query, key_value = (x.transpose(0, 1) for x in absorbed(inputs))
    attention = sparse_flash_attention(
        query,
        key_value,
        topk_indices,
        sizes.softmax_scale,
        value_dim=sizes.latent_dim,
        return_attention_sum=True,
    )
    # [heads, length, value_dim]
    out = torch.bmm(attention.out[0].transpose(0, 1), inputs.up_value.transpose(1, 2))
    assert attention.attention_sum is not None
    return out.transpose(0, 1), query.detach(), key_value.detach(), attention.attention_sum


def absorbed(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the absorbed query and the key that all heads share.

    The query is ``[length, 1, heads, latent_dim + rope_dim]``, in the memory order that the operator reads.
    The key is ``[length, 1, latent_dim + rope_dim]``.
    """
    latent_query = torch.bmm(inputs.q_nope[:, 0].transpose(0, 1), inputs.up_key).transpose(0, 1)
    query = torch.cat([latent_query, inputs.q_rope[:, 0]], dim=-1)[:, None]
    return query, torch.cat([inputs.latent, inputs.key_rope], dim=-1)


def projected(inputs: Inputs, sizes: Sizes) -> tuple[Tensor, ...]:
    """Return query, key and value of every head, ``[length, 1, heads, ...]``, as MLA projects them."""
    # One projection for keys and values: [length, 1, heads, nope_dim + value_dim]
    up = torch.cat([inputs.up_key, inputs.up_value], dim=1).flatten(0, 1)
    key_nope, value = (
        torch.nn.functional.linear(inputs.latent, up)
        .view(sizes.length, 1, sizes.heads, -1)
        .split([sizes.nope_dim, sizes.value_dim], dim=-1)
    )
    query = torch.cat([inputs.q_nope, inputs.q_rope], dim=-1)
    key_rope = inputs.key_rope[:, :, None].expand(-1, -1, sizes.heads, -1)
    return query, torch.cat([key_nope, key_rope], dim=-1), value


def megatron_step(inputs: Inputs, grad_out: Tensor, sizes: Sizes, topk_indices: Tensor | None = None) -> Step:
    """Run Megatron's functions, in the order of its ``DSAttention.forward``.

    Args:
        inputs: see :class:`Inputs`.
        grad_out: gradient of the output.
        sizes: problem sizes.
        topk_indices: selection to use instead of Megatron's own, ``[1, length, topk]`` int64.
    """
    from megatron.core.transformer.experimental_attention_variant import dsa

    length = sizes.length
    query, key, value = projected(inputs, sizes)
    mask = torch.full((length, length), float("-inf")).triu(1)
    index_scores = dsa.DSAIndexer._compute_index_scores(
        None, inputs.index_query, inputs.index_weights, inputs.index_key
    )
    index_scores = index_scores + mask
    if topk_indices is None:
        topk_indices = index_scores.topk(min(sizes.topk, length), dim=-1)[1]
    out = dsa.unfused_dsa_fn(query, key, value, topk_indices, sizes.softmax_scale)
    loss = dsa.compute_dsa_indexer_loss(
        index_scores,
        topk_indices,
        query.detach(),
        key.detach(),
        sizes.softmax_scale,
        loss_coeff=1.0,
        sparse_loss=True,
        # Stands for a tensor parallel group of one rank.
        pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    )
    del mask, index_scores, query, key, value
    return _finish(inputs, grad_out, out, loss, topk_indices)


def _finish(inputs: Inputs, grad_out: Tensor, out: Tensor, loss: Tensor, topk_indices: Tensor) -> Step:
    gradients = torch.autograd.grad((out, loss), inputs.leaves, (grad_out, torch.ones_like(loss)))
    return Step(out.detach(), loss.detach(), topk_indices, gradients)


def require_same_results(sizes: Sizes, dtype: torch.dtype = torch.float32) -> float:
    """Run both sides on the same selection and compare their results.

    Args:
        sizes: problem sizes.
        dtype: inputs' dtype. In bf16, results differ by each side's rounding.

    Returns:
        The largest deviation of any result over its largest magnitude.

    Raises:
        RuntimeError: the deviation exceeds the dtype's bound.
    """
    bound = _BOUNDS[dtype]
    inputs, grad_out = make_inputs(sizes, dtype)
    ours = fused_step(inputs, grad_out, sizes)
    # Megatron has no empty entries: put the row's own key there. Its mask is assigned, not accumulated, so a
    # key may repeat.
    own_row = torch.arange(sizes.length)[None, :, None]
    selection = torch.where(ours.topk_indices < 0, own_row, ours.topk_indices.long())
    theirs = megatron_step(inputs, grad_out, sizes, selection)
    deviation = {
        name: float((one - other).abs().max().double() / other.abs().max())
        for name, one, other in zip(
            ["output", "loss", *(f"gradient of {name}" for name in vars(inputs))],
            [ours.out, ours.loss, *ours.gradients],
            [theirs.out, theirs.loss, *theirs.gradients],
            strict=True,
        )
    }
    wrong = {name: value for name, value in deviation.items() if not value < bound}
    if wrong:
        raise RuntimeError(f"the two sides differ by more than {bound} of the largest value: {wrong}")
    return max(deviation.values())
