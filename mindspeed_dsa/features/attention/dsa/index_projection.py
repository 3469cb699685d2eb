"""The indexer's query, key and weights from hidden states, by Megatron's own, or a fork's, projections."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mindspeed_dsa.features.attention.dsa.problem import IndexInputs
from mindspeed_dsa.features.attention.mla_projections import angles_of_pack
from mindspeed_dsa.integration.packs import Pack


class _NoScores:
    """Placeholder for the scores, which :func:`index_inputs` does not need."""

    def topk(self, k: int, dim: int = -1) -> tuple[None, None]:
        return None, None


@dataclass
class _Tap:
    """Records the arguments of Megatron's score function."""

    compute: bool
    inputs: IndexInputs | None = None


_tap: ContextVar[_Tap | None] = ContextVar("_tap", default=None)


def tap_index_scores(original: Callable[..., Tensor]) -> Callable[..., Any]:
    """Decorate ``DSAIndexer._compute_index_scores`` of releases that have no ``forward_before_topk``.

    The projections, rotary embedding and rotation before it remain Megatron's, or a fork's, own.
    """

    def _compute_index_scores(self: Any, q: Tensor, weights: Tensor, k: Tensor) -> Any:
        tap = _tap.get()
        if tap is None:
            return original(self, q, weights, k)
        tap.inputs = IndexInputs.from_megatron(q, k, weights)
        return original(self, q, weights, k) if tap.compute else _NoScores()

    return _compute_index_scores


_angles: ContextVar[Tensor | None] = ContextVar("_angles", default=None)
"""Angles of packed documents' rows, while their inputs are projected."""


def rotate_by_documents(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``DSAIndexer._apply_rope``: documents of a pack begin at position 0 each."""

    def _apply_rope(self: Any, x: Tensor, rotary_pos_emb: Tensor, mscale: float) -> Tensor:
        return original(self, x, angles_of_rows(rotary_pos_emb), mscale)

    return _apply_rope


def angles_of_rows(angles: Tensor) -> Tensor:
    """``[s, 1, 1, rope]``: those of packed documents, if any are being projected, in place of ``angles``."""
    of_documents = _angles.get()
    return angles if of_documents is None else of_documents


def index_inputs(indexer: Any, x: Tensor, qr: Tensor, keys: int, pack: Pack | None = None) -> IndexInputs:
    """Project hidden states and latent queries for the indexer.

    Args:
        indexer: a ``DSAIndexer``, Megatron's or ours.
        x: ``[sequence, batch, hidden]``, a rank's part of the sequence under sequence parallelism.
        qr: ``[sequence, batch, q_lora_rank]``, likewise.
        keys: number of keys of the main attention; each must have an index key.
        pack: documents that the rows belong to; None for whole sequences.

    Raises:
        ValueError: there are more or fewer index keys.
    """
    token = _angles.set(None if pack is None else angles_of_pack(indexer.rotary_pos_emb, pack)[0])
    try:
        if hasattr(indexer, "forward_before_topk"):
            inputs = IndexInputs.from_megatron(*indexer.forward_before_topk(x, qr, None))
        else:
            inputs, _ = run_tapped(indexer, x, qr, None, compute=False)
    finally:
        _angles.reset(token)
    if inputs.key.shape[1] != keys:
        raise ValueError(
            f"fused-dsa: the indexer has {inputs.key.shape[1]} keys to select from and the attention {keys}; "
            "under context parallelism gather the index keys of the whole sequence as well"
        )
    return inputs


def run_tapped(
    indexer: Any, x: Tensor, qr: Tensor, mask: Tensor | None, compute: bool
) -> tuple[IndexInputs, tuple[Any, Any]]:
    """Run Megatron's ``forward_with_scores``, with or without its scores.

    Args:
        indexer: Megatron's ``DSAIndexer``.
        x: as for :func:`index_inputs`.
        qr: as for :func:`index_inputs`.
        mask: ``[sequence, sequence]``, added to the scores.
        compute: whether to compute scores.

    Returns:
        The indexer's query, key and weights, and scores and selection, both None without ``compute``.
    """
    tap = _Tap(compute)
    token = _tap.set(tap)
    try:
        result = indexer.forward_with_scores(x, qr, mask=mask, packed_seq_params=None)
    finally:
        _tap.reset(token)
    assert tap.inputs is not None
    return tap.inputs, result
