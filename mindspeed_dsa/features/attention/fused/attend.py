"""Main attention over the chosen keys, absorbed or by head, on the operator or on Megatron's own code.

Shapes here are Megatron's, sequence first. In absorbed form the query is ``[s, b, heads, latent + rope]``,
the key ``[s, b, 1, latent + rope]``, and the place of the value is taken by the value's up-projection,
``[heads, value_dim, latent]``, which is applied to what the attention returns.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.features.attention.fused.indexer import for_host
from mindspeed_dsa.features.host import host
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention


@dataclass(frozen=True)
class Operands:
    """What the main attention gets, and the factor of its scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    softmax_scale: float
    ends: Tensor | None = None
    """``[s]`` int32: one past the last key that each query sees. None for plain causal rows, where each query
    sees its own key and those before it."""

    @property
    def absorbed(self) -> bool:
        """Whether ``value`` is the up-projection."""
        return self.value.dim() == 3

    @property
    def latent(self) -> int:
        """Width of the latent part of an absorbed key, which is its value."""
        return self.value.shape[-1]

    def up_projected(self, latent_out: Tensor) -> Tensor:
        """``[b, s, heads, latent]`` to ``[s, b, heads * value_dim]``."""
        return torch.einsum("bshc,hdc->sbhd", latent_out, self.value).flatten(2)


@dataclass
class Attended:
    """What the attention returns, and what the indexer loss can take from it."""

    out: Tensor
    """``[s, b, heads * value_dim]``."""
    attention_sum: Tensor | None = None
    """``[b, s, topk]`` fp32: probabilities summed over this rank's heads."""
    lse: Tensor | None = None
    """``[b, s, heads]`` fp32, of the absorbed form."""


def attend_sparsely(
    operands: Operands,
    topk_indices: Tensor,
    backend: str,
    with_sum: bool,
    topk_scores: Tensor | None = None,
    score_gradient: Callable[[Tensor], Tensor] | None = None,
) -> Attended:
    """The Sparse Flash Attention operator.

    Args:
        operands: query, key, value and scale.
        topk_indices: ``[b, s, topk]``, as the operators want them.
        backend: of the operator.
        with_sum: whether to return ``attention_sum``.
        topk_scores: see the operator; absorbed form only, and so is the next one.
        score_gradient: see the operator.
    """
    # [b, s, heads, dim]
    query = operands.query.transpose(0, 1)
    if operands.absorbed:
        result = sparse_flash_attention(
            query,
            operands.key.squeeze(2).transpose(0, 1),
            topk_indices,
            operands.softmax_scale,
            value_dim=operands.latent,
            return_attention_sum=with_sum,
            topk_scores=topk_scores,
            score_gradient=score_gradient,
            backend=backend,
        )
        return Attended(operands.up_projected(result.out), result.attention_sum, result.lse)

    # The operator has one key-value head whose value is the key's leading part: each head is a call, its
    # value in front of its key, and zeros in front of its query.
    value_dim = operands.value.shape[-1]
    outputs, summed = [], None
    for head in range(query.shape[2]):
        key_value = torch.cat([operands.value[:, :, head], operands.key[:, :, head]], dim=-1)
        result = sparse_flash_attention(
            F.pad(query[:, :, head : head + 1], (value_dim, 0)),
            key_value.transpose(0, 1),
            topk_indices,
            operands.softmax_scale,
            value_dim=value_dim,
            return_attention_sum=with_sum,
            backend=backend,
        )
        outputs.append(result.out)
        if result.attention_sum is not None:
            summed = result.attention_sum if summed is None else summed + result.attention_sum
    return Attended(torch.cat(outputs, dim=2).transpose(0, 1).flatten(2), summed)


def attention_sum_by_head(operands: Operands, topk_indices: Tensor, backend: str) -> Tensor:
    """Probabilities summed over heads that have keys of their own: ``[b, s, topk]`` fp32, no gradient."""
    with torch.no_grad():
        summed = attend_sparsely(operands, topk_indices, backend, with_sum=True).attention_sum
    assert summed is not None
    return summed


def attend_with_host(operands: Operands, topk_indices: Tensor) -> Attended:
    """Megatron's ``unfused_dsa_fn``: holds ``[b, heads, s, s]``."""
    dsa = host("core.transformer.experimental_attention_variant.dsa")
    query, key, value = operands.query, operands.key, operands.value
    if operands.absorbed:
        key = expanded_key(operands)
        value = key[..., : operands.latent]
    out = dsa.unfused_dsa_fn(query, key, value, for_host(topk_indices), operands.softmax_scale)
    if operands.absorbed:
        out = operands.up_projected(out.unflatten(-1, (query.shape[2], -1)).transpose(0, 1))
    return Attended(out)


def expanded_key(operands: Operands) -> Tensor:
    """The key with as many heads as the query, as Megatron's functions want it."""
    return operands.key.expand(-1, -1, operands.query.shape[2], -1)


def attend_densely(operands: Operands, backend: str) -> Attended:
    """Causal attention over all keys.

    PyTorch's attention wherever it has a kernel that holds no ``[s, s]``; absorbed heads are too wide for
    that on accelerators, where the sparse operator, given every visible key, does the same.
    """
    query, key, value = operands.query, operands.key, operands.value
    if operands.absorbed and query.device.type != "cpu":
        return attend_sparsely(
            operands, all_visible(query.shape[1], key.shape[0], query.device, operands.ends), backend, False
        )
    if operands.absorbed:
        key = expanded_key(operands)
        value = key[..., : operands.latent]
    # The kernels want values as wide as keys.
    padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
    mask = None
    if operands.ends is not None:  # [s, keys]
        mask = torch.arange(key.shape[0], device=key.device) < operands.ends[:, None]
    # [s, b, heads, dim] -> [b, heads, s, dim]
    out = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        padded.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        scale=operands.softmax_scale,
    )[..., : value.shape[-1]]
    if operands.absorbed:
        return Attended(operands.up_projected(out.transpose(1, 2)))
    return Attended(out.permute(2, 0, 1, 3).flatten(2))


def all_visible(batch: int, keys: int, device: torch.device, ends: Tensor | None = None) -> Tensor:
    """``[batch, rows, keys]`` int32: all keys that each row sees, -1 at the tail; see :class:`Operands`."""
    position = torch.arange(keys, dtype=torch.int32, device=device)
    ends = position + 1 if ends is None else ends
    return position.where(position < ends[:, None], -1).expand(batch, -1, -1)
