"""Sparse attention in place of dense latent attention, shared by all TorchTitan releases.

The functions take queries and latent keys projected by the model's own layers. If these are DTensors, our
operators get the local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial

from mindspeed_dsa.integrations.torchtitan.names import SparseOptions
from mindspeed_dsa.ops.dsa import deepseek_sparse_attention, is_faster_by_head

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Model's rotary embedding (adjacent pairs), a function of ``[..., heads, rope]`` or ``[..., 1, rope]``."""


class Projected(NamedTuple):
    """Queries and latent keys of a layer, for this rank's heads."""

    query: Tensor
    """``[batch, rows, heads, nope + rope]``, rotated."""
    latent: Tensor
    """``[batch, rows, rank]``, normalised."""
    key_rope: Tensor
    """``[batch, rows, rope]``, rotated, shared by all heads."""
    up_projection: Tensor
    """``[heads * (nope + value), rank]``: projection of the latent to keys and values of each head."""
    softmax_scale: float
    value_dim: int


class IndexOperands(NamedTuple):
    """Indexer's queries, keys and weights; all heads are on every tensor parallel rank."""

    query: Tensor
    """``[batch, rows, index_heads, index_dim]``."""
    key: Tensor
    """``[batch, rows, index_dim]``."""
    weights: Tensor
    """``[batch, rows, index_heads]`` fp32, with all scales applied."""


def index_operands(
    indexer: Any, hidden: Tensor, query_input: Tensor, rotate: Rotate, options: SparseOptions, rope_dim: int
) -> IndexOperands:
    """Project the indexer's operands, with DeepSeek-V3.2's names and shapes.

    Args:
        indexer: module with ``wq_b``, ``wk``, ``k_norm`` and ``weights_proj``.
        hidden: input of the attention, ``[..., rows, dim]``.
        query_input: normalised latent query ``[..., rows, q_lora_rank]``, or ``hidden`` without one.
        rotate: model's rotary embedding.
        options: options of sparse attention.
        rope_dim: number of rotated dimensions, the first ones of each head.
    """
    query = indexer.wq_b(query_input).unflatten(-1, (options.index_heads, options.index_dim))
    key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(-2)
    rest = options.index_dim - rope_dim
    (query_rope, query), (key_rope, key) = (x.split([rope_dim, rest], dim=-1) for x in (query, key))
    if options.rope_layout == "halves":
        # DeepSeek-V3.2 pairs dimension i with i + rope/2, and the model's embedding pairs 2i with 2i + 1.
        # Reordering query and key alike puts the pairs side by side: (0, 1, 2, 3) becomes (0, 2, 1, 3). Their
        # dot product does not depend on the order.
        query_rope, key_rope = (
            x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in (query_rope, key_rope)
        )
    query_rope, key_rope = rotate(query_rope, key_rope)
    weights = indexer.weights_proj(hidden).float() * (options.index_heads * options.index_dim) ** -0.5
    query, key = torch.cat([query_rope, query], dim=-1), torch.cat([key_rope, key], dim=-1).squeeze(-2)
    return IndexOperands(*(local(x) for x in (query, key, weights)))


def local(x: Tensor, shared: bool = False) -> Tensor:
    """Return the local tensor of a DTensor; return a plain tensor unchanged.

    Args:
        x: any tensor.
        shared: whether the ranks' gradients of a replicated tensor are partial and must be summed.
    """
    if not isinstance(x, DTensor):
        return x
    if not shared:
        return x.to_local()
    return x.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in x.placements])


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Run the block with newly seeded random generators, and restore the generators' state afterwards."""
    # The seed is the next number of the device's generator. Ranks with equal generators therefore use equal
    # seeds, and each layer uses a different one. fork_rng always saves the CPU generator; `devices` are
    # additional ones.
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(int(torch.randint(1 << 31, (), device=device)))
        yield


def document_starts(positions: Tensor) -> Tensor:
    """Return the index where each token's document begins; ``positions`` ``[batch, rows]`` restart at 0."""
    index = torch.arange(positions.shape[-1], device=positions.device)
    # positions 0 1 2 0 1: starts 0 0 0 3 3.
    return torch.where(positions == 0, index, 0).cummax(dim=-1).values


class Attention(NamedTuple):
    """Core attention of a layer with sparse attention."""

    options: SparseOptions
    rows: int
    """Tokens of a step on all ranks; the loss is a mean over them."""
    tensor: ProcessGroup | None
    """Tensor parallel group over which heads are split; ``None`` without one."""

    def attend(
        self, projected: Projected, index: IndexOperands, starts: Tensor | None, trains: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the keys that the indexer selects.

        Attention runs on keys and values per head or in the absorbed form, whichever is faster on the device.

        Args:
            projected: layer's projections.
            index: indexer's projections.
            starts: ``[batch, rows]`` int, first visible key of each token; ``None`` means 0 for all.
            trains: whether to compute the indexer's loss.

        Returns:
            Output ``[batch, rows, heads * value_dim]`` and detached indexer loss, a mean over this rank's
            tokens without the coefficient. The output's backward also backpropagates the loss. The loss is
            ``None`` if ``trains`` is false.
        """
        options, value_dim = self.options, projected.value_dim
        query, latent, key_rope = projected.query, projected.latent, projected.key_rope
        heads, rank, rope = query.shape[2], latent.shape[-1], key_rope.shape[-1]
        nope = query.shape[-1] - rope
        up = projected.up_projection.unflatten(0, (heads, nope + value_dim))
        common: dict[str, Any] = {
            "topk": options.topk,
            "softmax_scale": projected.softmax_scale,
            "stage": options.stage,
            "with_loss": trains and options.loss_coeff > 0,
            "starts": starts,
            "reduction": "sum",
            "tp_group": self.tensor,
            "backend": options.backend,
        }
        # Width of a key and value per head, by head and absorbed. DeepSeek-V3.2: 128 + 64 + 128 = 320 by
        # head, 512 + 64 + 512 = 1088 absorbed.
        keys, widths = latent.shape[1], (nope + rope + value_dim, rank + rope + rank)
        if is_faster_by_head(query.device, keys, options.topk, heads, widths, options.backend):
            both = F.linear(latent, up.flatten(0, 1)).unflatten(-1, (heads, -1))
            key, value = both.split([nope, value_dim], dim=-1)
            key = torch.cat([key, key_rope[:, :, None].expand(-1, -1, heads, -1)], dim=-1)
            result = deepseek_sparse_attention(query, key, value, *index, **common)
            out = result.out
        else:
            up_key, up_value = up.split([nope, value_dim], dim=1)
            # Move the key's up-projection to the query: q (U c) = (q U) c.
            absorbed = torch.einsum("blhd,hdr->blhr", query[..., :nope], up_key)
            result = deepseek_sparse_attention(
                torch.cat([absorbed, query[..., nope:]], dim=-1),
                torch.cat([latent, key_rope], dim=-1),
                None,
                *index,
                value_dim=rank,
                **common,
            )
            # The output is a mixture of latents. Project it to each head's values.
            out = torch.einsum("blhr,hvr->blhv", result.out, up_value)
        out = out.flatten(2)
        # The operator returns a sum over tokens. The gradient uses the mean over a whole step's tokens.
        if result.loss is None:
            return out, None
        mean = result.loss.detach() / (out.shape[0] * out.shape[1])
        return _WithLoss.apply(out, result.loss, options.loss_coeff / self.rows), mean


class _WithLoss(torch.autograd.Function):
    """Identity on the attention output whose backward also backpropagates the indexer loss."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(loss)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        (loss,) = ctx.saved_tensors
        return grad_out, torch.full_like(loss, ctx.factor), None


def indexer_losses(model: nn.Module) -> dict[str, float]:
    """Return a dict from module name to the indexer loss of the last pass, averaged over this rank's tokens.

    Copies the losses from the device, which blocks. Layers without a loss, such as layers of other pipeline
    stages, are left out.
    """
    return {
        name: float(module.indexer_loss)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "indexer_loss", None), Tensor)
    }
