"""Modules of DeepSeek Sparse Attention for models of any framework: the indexer, and what it is part of."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.ops.compiled import outside_graphs
from mindspeed_dsa.ops.dsa.attention import DSAOutput, Stage, deepseek_sparse_attention
from mindspeed_dsa.ops.precision import without_autocast
from mindspeed_dsa.ops.rotary import Layout, rotate, rotation


class IndexerOperands(NamedTuple):
    """Operands of the indexer, as the operators take them."""

    query: Tensor
    """``[batch, rows, index_heads, index_dim]``."""
    key: Tensor
    """``[batch, rows, index_dim]``."""
    weights: Tensor
    """``[batch, rows, index_heads]`` fp32, every scale included."""


class Indexer(nn.Module):
    """Indexer of a layer: projections, key norm and rotary embedding.

    Parameters have the names and shapes of DeepSeek-V3.2's published ones, so that its ``indexer.*`` tensors
    load as they are. The Hadamard rotation that its inference code applies to query and key is orthogonal and
    changes no score; it matters for FP8 alone and is not here.

    Args:
        hidden_size: width of the hidden states.
        query_size: width of what queries are projected from, ``q_lora_rank``; default ``hidden_size``.
        heads: ``index_n_heads``.
        head_dim: ``index_head_dim``.
        rope_dim: how many leading dimensions of a head are rotated, an even number.
        rope_layout: which of them are a pair: ``"halves"`` for DeepSeek-V3.2, ``"pairs"`` for GLM-5.
        backend: of the rotation, see :data:`mindspeed_dsa.ops.backend.BackendName`.
        device: of the parameters, and so is the next one.
        dtype: of the parameters but the weights' projection, which DeepSeek keeps in fp32.
    """

    def __init__(
        self,
        hidden_size: int,
        query_size: int | None = None,
        *,
        heads: int = 64,
        head_dim: int = 128,
        rope_dim: int = 64,
        rope_layout: Layout = "halves",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require(
            rope_dim % 2 == 0 and 0 <= rope_dim <= head_dim,
            type(self).__name__,
            f"rope_dim must be even and at most head_dim = {head_dim}, got {rope_dim}",
        )
        self.heads, self.head_dim, self.rope_dim = heads, head_dim, rope_dim
        self.rope_layout, self.backend = rope_layout, backend
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.wq_b = nn.Linear(query_size or hidden_size, heads * head_dim, bias=False, **made)
        self.wk = nn.Linear(hidden_size, head_dim, bias=False, **made)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6, **made)
        self.weights_proj = nn.Linear(hidden_size, heads, bias=False, device=device, dtype=torch.float32)

    def forward(
        self, hidden: Tensor, query_input: Tensor | None = None, angles: Tensor | None = None
    ) -> IndexerOperands:
        """Project hidden states to the operands of the indexer.

        Args:
            hidden: ``[batch, rows, hidden_size]``.
            query_input: ``[batch, rows, query_size]``, the normalised latent query; default ``hidden``.
            angles: ``[rows, rope_dim / 2]`` or ``[batch, rows, rope_dim / 2]``, position times inverse
                frequency; None rotates nothing.
        """
        query = self.wq_b(hidden if query_input is None else query_input)
        query = query.unflatten(-1, (self.heads, self.head_dim))
        # Norms have results in fp32 under autocast on accelerators.
        key = self.k_norm(self.wk(hidden)).to(query.dtype).unsqueeze(2)
        if angles is not None and self.rope_dim:
            query, key = (self._rotated(x, angles) for x in (query, key))
        with without_autocast(hidden.device.type):
            weights = self.weights_proj(hidden.to(self.weights_proj.weight.dtype)).float()
        return IndexerOperands(query, key.squeeze(2), weights * (self.heads * self.head_dim) ** -0.5)

    @outside_graphs
    def _rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate the leading dimensions of the heads of ``[batch, rows, heads, dim]``."""
        require(
            angles.shape[-1] * 2 == self.rope_dim and angles.dim() in (2, 3),
            type(self).__name__,
            f"angles are [rows, {self.rope_dim // 2}] or [batch, rows, {self.rope_dim // 2}], got "
            f"{list(angles.shape)}",
        )
        if self.rope_layout == "pairs":
            twice = angles.repeat_interleave(2, dim=-1)
        else:
            twice = torch.cat([angles, angles], dim=-1)
        # The operator has rows first: [rows, batch or 1, 1, rope_dim].
        twice = twice[:, None, None] if twice.dim() == 2 else twice.transpose(0, 1).unsqueeze(2)
        x = x.transpose(0, 1)
        return rotate(x, rotation(twice, 1.0, self.rope_layout, x, self.backend)).transpose(0, 1)


class DeepSeekSparseAttention(nn.Module):
    """Attention of a layer between a model's projections of query, key and value and that of the output.

    It holds the indexer's parameters and nothing else. What the indexer reads is detached, as DeepSeek trains
    it: the model learns from its own loss, the indexer from :attr:`DSAOutput.loss`.

    Args:
        indexer: any module that is called like :class:`Indexer`.
        topk: keys per row.
        softmax_scale: factor of the attention's scores.
        value_dim: for absorbed keys: their leading part that is the value.
        stage: of the training, see :data:`mindspeed_dsa.ops.dsa.attention.Stage`; an attribute to change.
        backend: see :data:`mindspeed_dsa.ops.backend.BackendName`.
    """

    def __init__(
        self,
        indexer: nn.Module,
        *,
        topk: int,
        softmax_scale: float,
        value_dim: int | None = None,
        stage: Stage = "sparse",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.indexer, self.topk, self.softmax_scale = indexer, topk, softmax_scale
        self.value_dim, self.stage, self.backend = value_dim, stage, backend

    def forward(
        self,
        hidden: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        query_input: Tensor | None = None,
        angles: Tensor | None = None,
        with_loss: bool | None = None,
        **rows: Any,
    ) -> DSAOutput:
        """Attend as :func:`deepseek_sparse_attention`.

        Args:
            hidden: ``[batch, rows, hidden_size]``, what the layer projects.
            query: as there, and so are the next two.
            key: by head or absorbed, after its rotary embedding.
            value: by head, or None.
            query_input: what the indexer projects queries from, see :meth:`Indexer.forward`.
            angles: of the indexer's rotary embedding, see there.
            with_loss: whether to compute the loss; default: in training, where a parameter of the indexer
                requires a gradient.
            **rows: ``starts``, ``ends``, ``form``, ``cu_seqlens``, ``row_mask``, ``reduction`` and
                ``tp_group`` as there.
        """
        if with_loss is None:
            trains = any(parameter.requires_grad for parameter in self.indexer.parameters())
            with_loss = self.training and trains and torch.is_grad_enabled()
        with torch.set_grad_enabled(with_loss and torch.is_grad_enabled()):
            operands = self.indexer(
                hidden.detach(), None if query_input is None else query_input.detach(), angles
            )
        return deepseek_sparse_attention(
            query,
            key,
            value,
            *operands,
            topk=self.topk,
            softmax_scale=self.softmax_scale,
            value_dim=self.value_dim,
            stage=self.stage,
            with_loss=with_loss,
            backend=self.backend,
            **rows,
        )

    def extra_repr(self) -> str:
        return f"topk={self.topk}, softmax_scale={self.softmax_scale:.4g}, stage={self.stage!r}"
