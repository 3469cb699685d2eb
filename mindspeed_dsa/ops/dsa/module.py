"""DeepSeek Sparse Attention as framework-independent ``nn.Module`` classes: indexer and attention."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.ops.compiled import outside_graphs
from mindspeed_dsa.ops.dsa.attention import DSAOutput, Stage, deepseek_sparse_attention
from mindspeed_dsa.ops.precision import without_autocast
from mindspeed_dsa.ops.rotary import Layout, rotate, rotation


class IndexerOperands(NamedTuple):
    """Query, key and head weights of the indexer, in the shapes that the operators take."""

    query: Tensor
    """``[batch, rows, index_heads, index_dim]``."""
    key: Tensor
    """``[batch, rows, index_dim]``."""
    weights: Tensor
    """``[batch, rows, index_heads]`` fp32, already multiplied with every scale."""


class Indexer(nn.Module):
    """Indexer of a layer: projections, key norm and rotary embedding.

    Parameters have the names and shapes of DeepSeek-V3.2's published checkpoint, so its ``indexer.*`` tensors
    load unchanged. DeepSeek's inference code also applies a Hadamard rotation to query and key. It is
    orthogonal and changes no score, so it only matters for FP8, and is omitted here.

    Args:
        hidden_size: width of the hidden states.
        query_size: width of the input that queries are projected from, ``q_lora_rank``; default
            ``hidden_size``.
        heads: number of heads, ``index_n_heads``.
        head_dim: size of a head, ``index_head_dim``.
        rope_dim: number of dimensions of a head that are rotated, an even number; 0 for none.
        rope_layout: pairing of these dimensions: ``"halves"`` for DeepSeek-V3.2, ``"pairs"`` for GLM-5.
        rope_at: whether the rotated dimensions are the ``"first"`` or the ``"last"`` of a head.
        key_norm_dtype: dtype of the key norm's parameters and input, fp32 for HY-V4; default ``dtype``, with
            the projected key as it is.
        key_norm_eps: term of the key norm's variance.
        backend: backend of the rotation, see :data:`mindspeed_dsa.ops.backend.BackendName`.
        device: device of the parameters.
        dtype: dtype of the parameters except the weights' projection, which DeepSeek keeps in fp32.
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
        rope_at: Literal["first", "last"] = "first",
        key_norm_dtype: torch.dtype | None = None,
        key_norm_eps: float = 1e-6,
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
        require(
            rope_at in ("first", "last"),
            type(self).__name__,
            f"rope_at must be 'first' or 'last', got {rope_at!r}",
        )
        self.heads, self.head_dim, self.rope_dim = heads, head_dim, rope_dim
        self.rope_at, self.key_norm_dtype = rope_at, key_norm_dtype
        self.rope_layout, self.backend = rope_layout, backend
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.wq_b = nn.Linear(query_size or hidden_size, heads * head_dim, bias=False, **made)
        self.wk = nn.Linear(hidden_size, head_dim, bias=False, **made)
        self.k_norm = nn.LayerNorm(head_dim, key_norm_eps, device=device, dtype=key_norm_dtype or dtype)
        self.weights_proj = nn.Linear(hidden_size, heads, bias=False, device=device, dtype=torch.float32)

    def forward(
        self, hidden: Tensor, query_input: Tensor | None = None, angles: Tensor | None = None
    ) -> IndexerOperands:
        """Project hidden states to the operands of the indexer.

        Args:
            hidden: ``[batch, rows, hidden_size]`` hidden states.
            query_input: ``[batch, rows, query_size]``, the normalized latent query; default ``hidden``.
            angles: ``[rows, rope_dim / 2]`` or ``[batch, rows, rope_dim / 2]``, position times inverse
                frequency; None disables the rotation.
        """
        query = self.wq_b(hidden if query_input is None else query_input)
        query = query.unflatten(-1, (self.heads, self.head_dim))  # [batch, rows, heads, head_dim]
        # Under autocast, norms return fp32 on accelerators.
        key = self.wk(hidden)  # [batch, rows, head_dim]
        if self.key_norm_dtype is not None:
            key = key.to(self.key_norm_dtype)
        key = self.k_norm(key).to(query.dtype).unsqueeze(2)  # [batch, rows, 1, head_dim]
        if angles is not None and self.rope_dim:
            query, key = (self._rotated(x, angles) for x in (query, key))
        with without_autocast(hidden.device.type):
            weights = self.weights_proj(hidden.to(self.weights_proj.weight.dtype)).float()
        # key: [batch, rows, head_dim]
        return IndexerOperands(query, key.squeeze(2), weights * (self.heads * self.head_dim) ** -0.5)

    @outside_graphs
    def _rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate the first or last dimensions of each head of ``[batch, rows, heads, dim]``."""
        require(
            angles.shape[-1] * 2 == self.rope_dim and angles.dim() in (2, 3),
            type(self).__name__,
            f"angles are [rows, {self.rope_dim // 2}] or [batch, rows, {self.rope_dim // 2}], got "
            f"{list(angles.shape)}",
        )
        if self.rope_layout == "pairs":
            twice = angles.repeat_interleave(2, dim=-1)  # [..., rope_dim]
        else:
            twice = torch.cat([angles, angles], dim=-1)  # [..., rope_dim]
        # The operator has rows first: [rows, batch or 1, 1, rope_dim].
        twice = twice[:, None, None] if twice.dim() == 2 else twice.transpose(0, 1).unsqueeze(2)
        x = x.transpose(0, 1)  # [rows, batch, heads, dim]
        by = rotation(twice, 1.0, self.rope_layout, x, self.backend)
        if self.rope_at == "last":
            plain, turned = x.split((self.head_dim - self.rope_dim, self.rope_dim), dim=-1)
            x = torch.cat((plain, rotate(turned, by)), dim=-1)  # [rows, batch, heads, dim]
        else:
            x = rotate(x, by)
        return x.transpose(0, 1)


class DeepSeekSparseAttention(nn.Module):
    """Attention of a layer, between a model's query, key and value projections and its output projection.

    Its only parameters are the indexer's. The indexer's inputs are detached, as in DeepSeek's training: the
    model learns from its own loss, the indexer from :attr:`DSAOutput.loss`.

    Args:
        indexer: module with the call signature of :class:`Indexer`.
        topk: number of keys to select per query.
        softmax_scale: factor of the attention's scores.
        value_dim: size of the leading part of absorbed keys that is the value; None for keys by head.
        stage: training stage, see :data:`mindspeed_dsa.ops.dsa.attention.Stage`; an attribute that may be
            changed.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.
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
        """Run the indexer, then :func:`deepseek_sparse_attention`.

        Args:
            hidden: ``[batch, rows, hidden_size]``, input of the layer's projections.
            query: query argument of :func:`deepseek_sparse_attention`.
            key: key by head or absorbed, after its rotary embedding.
            value: value by head, or None for absorbed keys.
            query_input: input of the indexer's query projection, see :meth:`Indexer.forward`.
            angles: angles of the indexer's rotary embedding, see :meth:`Indexer.forward`.
            with_loss: whether to compute the loss; by default in training, if a parameter of the indexer
                requires a gradient.
            **rows: further arguments of :func:`deepseek_sparse_attention`: ``sink``, ``starts``, ``ends``,
                ``form``, ``cu_seqlens``, ``row_mask``, ``reduction`` and ``tp_group``.

        Returns:
            :class:`DSAOutput`.
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
