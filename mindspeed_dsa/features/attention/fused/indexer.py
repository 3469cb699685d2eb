"""Which keys each query attends to: chosen by the Lightning Indexer operator or by Megatron's own code.

Imports Megatron only when called: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.features.host import host


@dataclass
class IndexInputs:
    """What the indexer scores keys with, in the operators' layout."""

    query: Tensor
    """``[batch, sequence, index_heads, index_dim]``."""
    key: Tensor
    """``[batch, sequence, index_dim]``."""
    weights: Tensor
    """``[batch, sequence, index_heads]``, every scale included."""

    @classmethod
    def from_host(cls, query: Tensor, key: Tensor, weights: Tensor) -> IndexInputs:
        """From Megatron's layout, sequence first."""
        return cls(query.transpose(0, 1), key.transpose(0, 1), weights.transpose(0, 1))


@dataclass
class Selection:
    """The chosen keys, and what the indexer loss needs to know about the choice."""

    topk_indices: Tensor
    """``[batch, sequence, topk]`` int32, ascending, -1 at the tail."""
    topk_scores: Tensor
    """``[batch, sequence, topk]``, differentiable; -inf where the index is -1."""
    inputs: IndexInputs
    scores: Tensor | None = None
    """``[batch, sequence, sequence]``, only where Megatron's own indexer made them."""


class _NoScores:
    """Stands for the scores that nobody asks for in :func:`index_inputs`."""

    def topk(self, k: int, dim: int = -1) -> tuple[None, None]:
        return None, None


@dataclass
class _Tap:
    """Takes down the arguments of Megatron's score function."""

    compute: bool
    inputs: IndexInputs | None = None


_tap: ContextVar[_Tap | None] = ContextVar("_tap", default=None)


def tap_index_scores(original: Callable[..., Tensor]) -> Callable[..., Any]:
    """Decorate ``DSAIndexer._compute_index_scores`` of releases that have no ``forward_before_topk``.

    The projections, rotary embedding and rotation in front of it stay Megatron's, or a fork's, own.
    """

    def _compute_index_scores(self: Any, q: Tensor, weights: Tensor, k: Tensor) -> Any:
        tap = _tap.get()
        if tap is None:
            return original(self, q, weights, k)
        tap.inputs = IndexInputs.from_host(q, k, weights)
        return original(self, q, weights, k) if tap.compute else _NoScores()

    return _compute_index_scores


def index_inputs(indexer: Any, x: Tensor, qr: Tensor, keys: int) -> IndexInputs:
    """Project hidden states and latent queries for the indexer.

    Args:
        indexer: Megatron's ``DSAIndexer``.
        x: ``[sequence, batch, hidden]``, a rank's part of the sequence under sequence parallelism.
        qr: ``[sequence, batch, q_lora_rank]``, likewise.
        keys: those of the main attention, each of which has an index key.

    Raises:
        ValueError: there are more or fewer index keys.
    """
    if hasattr(indexer, "forward_before_topk"):
        inputs = IndexInputs.from_host(*indexer.forward_before_topk(x, qr, None))
    else:
        tap, _ = _run_tapped(indexer, x, qr, None, compute=False)
        assert tap.inputs is not None
        inputs = tap.inputs
    if inputs.key.shape[1] != keys:
        raise ValueError(
            f"fused-dsa: the indexer has {inputs.key.shape[1]} keys to choose from and the attention {keys}; "
            "under context parallelism gather the index keys of the whole sequence as well"
        )
    return inputs


def choose_with_host(indexer: Any, x: Tensor, qr: Tensor) -> Selection:
    """Megatron's own scores and ``torch.topk``, causal; holds ``[batch, sequence, sequence]``."""
    if hasattr(indexer, "forward_before_topk"):
        dsa = host("core.transformer.experimental_attention_variant.dsa")
        projected = indexer.forward_before_topk(x, qr, None)
        inputs = IndexInputs.from_host(*projected)
        mask = causal_mask(inputs.query.shape[1], x.device)
        scores, chosen = dsa.fused_qk_topk_naive(*projected, indexer.index_topk, mask)
    else:
        parallel = indexer.config.tensor_model_parallel_size if indexer.config.sequence_parallel else 1
        mask = causal_mask(x.shape[0] * parallel, x.device)
        tap, (scores, chosen) = _run_tapped(indexer, x, qr, mask, compute=True)
        assert tap.inputs is not None
        inputs = tap.inputs
    topk_indices = canonical(chosen)
    gathered = scores.gather(-1, topk_indices.clamp_min(0).long())
    return Selection(topk_indices, gathered.masked_fill(topk_indices < 0, -torch.inf), inputs, scores)


def _run_tapped(
    indexer: Any, x: Tensor, qr: Tensor, mask: Tensor | None, compute: bool
) -> tuple[_Tap, tuple[Any, Any]]:
    tap = _Tap(compute)
    token = _tap.set(tap)
    try:
        return tap, indexer.forward_with_scores(x, qr, mask=mask, packed_seq_params=None)
    finally:
        _tap.reset(token)


def host_scores(indexer: Any, inputs: IndexInputs) -> Tensor:
    """Megatron's scores of all pairs, future keys at -inf: ``[batch, sequence, sequence]``."""
    operands = inputs.query.transpose(0, 1), inputs.weights.transpose(0, 1), inputs.key.transpose(0, 1)
    if hasattr(indexer, "_compute_index_scores"):
        scores = indexer._compute_index_scores(*operands)
    else:
        dsa = host("core.transformer.experimental_attention_variant.dsa")
        scores = dsa._compute_index_scores(*operands)
    return scores + causal_mask(scores.shape[-1], scores.device)  # type: ignore[no-any-return]


def causal_mask(length: int, device: torch.device) -> Tensor:
    """``[length, length]`` fp32, -inf above the diagonal and 0 elsewhere."""
    return torch.full((length, length), -torch.inf, dtype=torch.float32, device=device).triu_(1)


def canonical(chosen: Tensor) -> Tensor:
    """Megatron's choice, which fills short rows up with future keys, in the operators' form.

    Args:
        chosen: ``[batch, sequence, topk]``, int64 positions in any order.

    Returns:
        Same shape, int32, ascending, -1 at the tail.
    """
    length = chosen.shape[1]
    row = torch.arange(length, device=chosen.device)[:, None]
    ordered = chosen.masked_fill(chosen > row, length).sort(dim=-1).values
    return ordered.masked_fill(ordered == length, -1).int()


def for_host(topk_indices: Tensor) -> Tensor:
    """The operators' choice in a form that Megatron's functions can scatter: no -1, int64.

    The first key of a row stands again in the surplus places; scattering it twice does no harm.
    """
    return torch.where(topk_indices < 0, topk_indices[..., :1], topk_indices).long()
