"""Query, key and weights of the indexer from hidden states, by Megatron's own, or a fork's, projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mindspeed_dsa.context_parallel.gather import GatheredRows
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa.call import Call
from mindspeed_dsa.features.dsa.key_exchange.exchange import KeyExchange
from mindspeed_dsa.features.dsa.problem import IndexInputs
from mindspeed_dsa.megatron import second_stream


class _NoScores:
    """Placeholder for the scores, which :func:`start_index` does not need."""

    def topk(self, k: int, dim: int = -1) -> tuple[None, None]:
        return None, None


@dataclass
class _Tap:
    """Record of the arguments of Megatron's score function."""

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
        tap.inputs = IndexInputs.from_megatron(q, k, weights, self.config.dsa_indexer_scoring_relu)
        return original(self, q, weights, k) if tap.compute else _NoScores()

    return _compute_index_scores


_scores_elsewhere: ContextVar[bool] = ContextVar("_scores_elsewhere", default=False)


def scores_elsewhere() -> bool:
    """Return whether what an indexer is projecting is for our operators, which apply ReLU or not."""
    return _scores_elsewhere.get()


@contextmanager
def for_operators() -> Iterator[None]:
    """Have indexers project for our operators."""
    token = _scores_elsewhere.set(True)
    try:
        yield
    finally:
        _scores_elsewhere.reset(token)


_angles: ContextVar[Tensor | None] = ContextVar("_angles", default=None)
"""Angles of packed documents' rows, while their inputs are projected."""


def rotate_by_documents(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``DSAIndexer._apply_rope``: documents of a pack begin at position 0 each."""

    def _apply_rope(self: Any, x: Tensor, rotary_pos_emb: Tensor, mscale: float) -> Tensor:
        return original(self, x, angles_of_rows(rotary_pos_emb), mscale)

    return _apply_rope


def angles_of_rows(angles: Tensor) -> Tensor:
    """Return the angles of packed documents, if any are being projected, in place of ``[s, 1, 1, rope]``."""
    of_documents = _angles.get()
    return angles if of_documents is None else of_documents


@dataclass(frozen=True)
class IndexUnderWay:
    """Inputs of the indexer, whose keys other ranks may still have to send.

    Attributes:
        wait: returns the complete inputs, with the keys of the whole sequence.
        gathered: keys that are gathered, if any are.
    """

    wait: Callable[[], IndexInputs]
    gathered: tuple[GatheredRows, ...] = ()


def start_index(call: Call) -> IndexUnderWay:
    """Project a call's hidden states and latent queries for the indexer."""
    if call.exchange is not None:
        return _start_gathered(call, call.exchange)
    indexer, inputs = call.layer.indexer, indexer_arguments(call)
    angles = None if call.documents is None else call.documents.angles(indexer.rotary_pos_emb)[0]
    token = _angles.set(angles)
    try:
        if hasattr(indexer, "forward_before_topk"):
            with for_operators():
                query, key, weights = indexer.forward_before_topk(*inputs, None)
            use_relu = indexer.config.dsa_indexer_scoring_relu
            projected = IndexInputs.from_megatron(query, key, weights, use_relu)
        else:
            projected = run_tapped(indexer, *inputs, None, compute=False)[0]
    finally:
        _angles.reset(token)
    if call.earlier:
        projected = projected.of(slice(call.earlier, None), slice(None))
    return IndexUnderWay(lambda: projected)


def indexer_arguments(call: Call) -> tuple[Tensor, Tensor]:
    """Return hidden states and latent queries, with a batch."""
    qr = call.qr.detach()  # the loss must not train the model
    return call.x.detach(), qr.unsqueeze(1) if call.documents is not None and qr.dim() == 2 else qr


def _start_gathered(call: Call, exchange: KeyExchange) -> IndexUnderWay:
    """Project on one of several context parallel ranks.

    Megatron projects the query before the key. Here the key comes first, and is on its way while the query is
    projected. Key and weights need nothing but their own row, so that under sequence parallelism they are
    gathered instead of the hidden states.

    Args:
        call: whose indexer's modules, ``_apply_rope`` and sizes are used.
        exchange: of the layer.
    """
    indexer, documents, megatron = call.layer.indexer, call.documents, call.megatron
    x, qr = indexer_arguments(call)
    projected = second_stream.take_projected(indexer, x)
    if projected is not None:
        indexer = second_stream.view_with_projected(indexer, projected)
    hadamard = _hadamard(indexer, megatron)
    if documents is not None:
        angles, mscale = documents.angles(indexer.rotary_pos_emb)
    else:
        # The embedding makes the angles of the whole sequence and returns those of its context parallel rank.
        angles, mscale = indexer.rotary_pos_emb(x.size(0) * exchange.parts * exchange.ranks), 1.0
        if isinstance(angles, tuple):  # YaRN
            angles, mscale = angles
    key = _normed(indexer, indexer.linear_wk(x)[0]).unsqueeze(2)
    key = hadamard(indexer._apply_rope(key, exchange.own_part(angles), mscale)).squeeze(2)
    gathered = exchange.gather(key, is_replicated=True)
    weights = indexer.linear_weights_proj(x)[0] * (indexer.index_n_heads**-0.5 * indexer.softmax_scale)
    if exchange.parts > 1:
        gather = megatron("core.tensor_parallel").gather_from_sequence_parallel_region
        group = indexer.pg_collection.tp
        qr = gather(qr, group=group)
        # Each rank computes the gradient of all rows.
        weights = gather(weights, tensor_parallel_output_grad=False, group=group)
    query = indexer.linear_wq_b(qr)[0].unflatten(-1, (indexer.index_n_heads, indexer.index_head_dim))
    query = hadamard(indexer._apply_rope(query, angles, mscale))
    use_relu = indexer.config.dsa_indexer_scoring_relu

    def wait() -> IndexInputs:
        whole, receiver = gathered.wait_with_receiver()
        return IndexInputs.from_megatron(query, whole, weights, use_relu, receiver)

    return IndexUnderWay(wait, (gathered,))


def _normed(indexer: Any, key: Tensor) -> Tensor:
    if indexer.config.dsa_indexer_k_norm_fp32:
        return indexer.k_norm(key.float()).to(key.dtype)  # type: ignore[no-any-return]
    return indexer.k_norm(key)  # type: ignore[no-any-return]


def _hadamard(indexer: Any, megatron: Megatron) -> Callable[[Tensor], Tensor]:
    """Return the rotation of query and key, or none."""
    if not indexer.config.dsa_indexer_rotate_activation:
        return lambda states: states
    own: Callable[[Tensor], Tensor] | None = getattr(indexer, "rotate_activation", None)
    if own is not None:
        return own
    return megatron("core.transformer.experimental_attention_variant.dsa").rotate_activation  # type: ignore[no-any-return]


def run_tapped(
    indexer: Any, x: Tensor, qr: Tensor, mask: Tensor | None, compute: bool
) -> tuple[IndexInputs, tuple[Any, Any]]:
    """Run Megatron's ``forward_with_scores``, with or without its scores.

    Args:
        indexer: Megatron's ``DSAIndexer``.
        x: ``[sequence, batch, hidden]``, a rank's part of the sequence under sequence parallelism.
        qr: ``[sequence, batch, q_lora_rank]``, likewise.
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
