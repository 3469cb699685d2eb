"""Sparse attention in place of a latent attention's dense one: what every release of TorchTitan shares.

Tensors in, tensors out: queries and latent keys as the model's own layers project them. Where layers are
parallelised by DTensors, the operators see their local parts.
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
"""The model's rotary embedding of neighbours: query ``[..., heads, rope]`` and key ``[..., 1, rope]``."""


class Projected(NamedTuple):
    """Projections of a latent attention, on this rank's heads."""

    query: Tensor
    """``[batch, rows, heads, nope + rope]``, rotated."""
    latent: Tensor
    """``[batch, rows, rank]``, normalised."""
    key_rope: Tensor
    """``[batch, rows, rope]``, rotated, shared by all heads."""
    up_projection: Tensor
    """``[heads * (nope + value), rank]``: keys and values of each head from the latent."""
    softmax_scale: float
    value_dim: int


class IndexOperands(NamedTuple):
    """The indexer's projections; all heads, on every tensor parallel rank."""

    query: Tensor
    """``[batch, rows, index_heads, index_dim]``."""
    key: Tensor
    """``[batch, rows, index_dim]``."""
    weights: Tensor
    """``[batch, rows, index_heads]`` fp32, every scale included."""


def index_operands(
    indexer: Any, hidden: Tensor, query_input: Tensor, rotate: Rotate, options: SparseOptions, rope_dim: int
) -> IndexOperands:
    """Project the indexer's operands, named and shaped as DeepSeek-V3.2's.

    Rotary dimensions come first in a head. DeepSeek-V3.2 pairs each with the one half of them further, and
    the model's embedding with its neighbour: they are put side by side, in query and key alike, whose
    products do not depend on the order of dimensions.

    Args:
        indexer: has ``wq_b``, ``wk``, ``k_norm`` and ``weights_proj``.
        hidden: ``[..., rows, dim]``, input of the attention.
        query_input: ``[..., rows, q_lora_rank]``, the normalised latent query, or ``hidden`` without one.
        rotate: the model's rotary embedding.
        options: sizes of the indexer.
        rope_dim: how many dimensions are rotated.
    """
    query = indexer.wq_b(query_input).unflatten(-1, (options.index_heads, options.index_dim))
    key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(-2)
    rest = options.index_dim - rope_dim
    (query_rope, query), (key_rope, key) = (x.split([rope_dim, rest], dim=-1) for x in (query, key))
    if options.rope_layout == "halves":
        query_rope, key_rope = (
            x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in (query_rope, key_rope)
        )
    query_rope, key_rope = rotate(query_rope, key_rope)
    weights = indexer.weights_proj(hidden).float() * (options.index_heads * options.index_dim) ** -0.5
    query, key = torch.cat([query_rope, query], dim=-1), torch.cat([key_rope, key], dim=-1).squeeze(-2)
    return IndexOperands(*(local(x) for x in (query, key, weights)))


def local(x: Tensor, shared: bool = False) -> Tensor:
    """Return this rank's part of a DTensor; other tensors as they are.

    Args:
        x: any tensor.
        shared: where ranks hold the same, whether each of them finds a part of the gradient alone.
    """
    if not isinstance(x, DTensor):
        return x
    if not shared:
        return x.to_local()
    return x.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in x.placements])


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Seed the generators inside, and have them outside as if nothing had been drawn.

    The seed is what the device's generator would give next: ranks that draw alike have the same one, and
    every layer another.
    """
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(int(torch.randint(1 << 31, (), device=device)))
        yield


def document_starts(positions: Tensor) -> Tensor:
    """Return where each row's document begins: ``[batch, rows]`` of positions that begin at 0 in each."""
    at = torch.arange(positions.shape[-1], device=positions.device)
    return torch.where(positions == 0, at, 0).cummax(dim=-1).values


class Attention(NamedTuple):
    """Sparse attention of a layer."""

    options: SparseOptions
    rows: int
    """Rows of a step on all ranks: the loss is a mean over them."""
    tensor: ProcessGroup | None
    """Ranks that hold the other heads."""

    def attend(
        self, projected: Projected, index: IndexOperands, starts: Tensor | None, trains: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the keys that the indexer selects.

        By head, each with keys and values of its own, or in absorbed form, whichever takes less time here.

        Args:
            projected: the layer's projections.
            index: the indexer's.
            starts: ``[batch, rows]`` int, first visible key of each row; None: all rows see from 0 on.
            trains: whether the indexer's loss is wanted.

        Returns:
            ``[batch, rows, heads * value_dim]``, whose backward gives the indexer's loss its gradient, and
            that loss, detached, a mean over this rank's rows without the coefficient; None where nothing
            trains.
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
        keys, widths = latent.shape[1], (nope + rope + value_dim, rank + rope + rank)
        if is_faster_by_head(query.device, keys, options.topk, heads, widths, options.backend):
            both = F.linear(latent, up.flatten(0, 1)).unflatten(-1, (heads, -1))
            key, value = both.split([nope, value_dim], dim=-1)
            key = torch.cat([key, key_rope[:, :, None].expand(-1, -1, heads, -1)], dim=-1)
            result = deepseek_sparse_attention(query, key, value, *index, **common)
            out = result.out
        else:
            up_key, up_value = up.split([nope, value_dim], dim=1)
            absorbed = torch.einsum("blhd,hdr->blhr", query[..., :nope], up_key)
            result = deepseek_sparse_attention(
                torch.cat([absorbed, query[..., nope:]], dim=-1),
                torch.cat([latent, key_rope], dim=-1),
                None,
                *index,
                value_dim=rank,
                **common,
            )
            out = torch.einsum("blhr,hvr->blhv", result.out, up_value)
        out = out.flatten(2)
        if result.loss is None:
            return out, None
        mean = result.loss.detach() / (out.shape[0] * out.shape[1])
        return _WithLoss.apply(out, result.loss, options.loss_coeff / self.rows), mean


class _WithLoss(torch.autograd.Function):
    """Identity on the output; in backward the loss gets a gradient of its own, which nothing else scales."""

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
    """Return the indexer's loss of each layer in the last pass, a mean over this rank's rows, by name.

    Reads them from the device. Layers without one, such as those of other pipeline stages, are left out.
    """
    return {
        name: float(module.indexer_loss)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "indexer_loss", None), Tensor)
    }
