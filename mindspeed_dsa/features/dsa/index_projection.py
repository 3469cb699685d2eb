"""Projection of hidden states to the indexer's query, key and weights, by Megatron's or a fork's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mindspeed_dsa.context_parallel.gather import GatheredRows
from mindspeed_dsa.context_parallel.key_exchange import KeyExchange
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa.call import Call
from mindspeed_dsa.features.dsa.problem import IndexInputs
from mindspeed_dsa.megatron import second_stream


class _NoScores:
    """Placeholder for scores that are not computed; has only the method ``topk``, which Megatron calls."""

    def topk(self, k: int, dim: int = -1) -> tuple[None, None]:
        return None, None


_PROJECTION = "_mindspeed_dsa_projection"
"""Attribute of an indexer while it projects for our operators."""


@dataclass
class _Projection:
    """State that an indexer has while it computes query, key and weights for our operators.

    Attributes:
        angles: rotary angles of packed documents' tokens, if there are documents.
        compute: whether Megatron's own scores are computed as well.
        inputs: arguments captured from Megatron's score function.
    """

    angles: Tensor | None
    compute: bool
    inputs: IndexInputs | None = None


@contextmanager
def projecting(indexer: Any, angles: Tensor | None = None, compute: bool = False) -> Iterator[_Projection]:
    """Context in which an indexer computes the inputs of our operators; see :class:`_Projection`."""
    projection = _Projection(angles, compute)
    setattr(indexer, _PROJECTION, projection)
    try:
        yield projection
    finally:
        delattr(indexer, _PROJECTION)


def projection_of(indexer: Any) -> _Projection | None:
    """Return the indexer's state inside :func:`projecting`; ``None`` outside."""
    return getattr(indexer, _PROJECTION, None)


def tap_index_scores(original: Callable[..., Tensor]) -> Callable[..., Any]:
    """Decorate ``DSAIndexer._compute_index_scores`` of releases without ``forward_before_topk``.

    It captures the function's arguments for :func:`run_tapped`. The projections, rotary embedding and
    Hadamard rotation thus run in Megatron's or the fork's own code.
    """

    def _compute_index_scores(self: Any, q: Tensor, weights: Tensor, k: Tensor) -> Any:
        projection = projection_of(self)
        if projection is None:
            return original(self, q, weights, k)
        projection.inputs = IndexInputs.from_megatron(q, k, weights, self.config.dsa_indexer_scoring_relu)
        return original(self, q, weights, k) if projection.compute else _NoScores()

    return _compute_index_scores


def rotate_by_documents(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``DSAIndexer._apply_rope`` to restart positions at 0 in each packed document."""

    def _apply_rope(self: Any, x: Tensor, rotary_pos_emb: Tensor, mscale: float) -> Tensor:
        return original(self, x, angles_of_rows(self, rotary_pos_emb), mscale)

    return _apply_rope


def angles_of_rows(indexer: Any, angles: Tensor) -> Tensor:
    """Return the rotary angles passed to :func:`projecting`, or else ``angles``, ``[s, 1, 1, rope]``."""
    projection = projection_of(indexer)
    return angles if projection is None or projection.angles is None else projection.angles


@dataclass(frozen=True)
class IndexUnderWay:
    """Indexer inputs, whose key may still be in an all-gather.

    Attributes:
        wait: function that waits for the all-gather and returns the inputs, with the keys of the whole
            sequence.
        gathered: all-gathers of the key; empty without context parallelism.
    """

    wait: Callable[[], IndexInputs]
    gathered: tuple[GatheredRows, ...] = ()


def start_index(call: Call) -> IndexUnderWay:
    """Project hidden states and latent queries for the indexer, and start to gather the key."""
    if call.exchange is not None:
        return _start_gathered(call, call.exchange)
    indexer, inputs = call.layer.indexer, indexer_arguments(call)
    angles = None if call.documents is None else call.documents.angles(indexer.rotary_pos_emb)[0]
    if hasattr(indexer, "forward_before_topk"):
        with projecting(indexer, angles):
            query, key, weights = indexer.forward_before_topk(*inputs, call.of_indexer)
        use_relu = indexer.config.dsa_indexer_scoring_relu
        projected = IndexInputs.from_megatron(query, key, weights, use_relu)
    else:
        projected = run_tapped(indexer, *inputs, None, False, angles)[0]
    if call.earlier:
        # x included earlier tokens, which are keys but not queries: query [b, s, ...], key [b, keys, dim].
        projected = projected.of(slice(call.earlier, None), slice(None))
    return IndexUnderWay(lambda: projected)


def indexer_arguments(call: Call) -> tuple[Tensor, Tensor]:
    """Return the hidden states and latent queries, detached and with a batch dimension."""
    qr = call.qr.detach()  # the indexer loss must not train the rest of the model
    # Megatron drops the batch of packed latent queries: [t, q_lora_rank] -> [t, 1, q_lora_rank]
    return call.x.detach(), qr.unsqueeze(1) if call.documents is not None and qr.dim() == 2 else qr


def _start_gathered(call: Call, exchange: KeyExchange) -> IndexUnderWay:
    """Project the key first and start its all-gather, which overlaps with the query's projection."""
    # Megatron projects the query first. Key and weights are per token: under sequence parallelism they are
    # projected from this rank's shard, and gathered instead of the wider hidden states.
    indexer, documents, megatron = call.layer.indexer, call.documents, call.megatron
    x, qr = indexer_arguments(call)
    projected = second_stream.take_projected(indexer, x)
    if projected is not None:
        indexer = second_stream.view_with_projected(indexer, projected)
    hadamard = _hadamard(indexer, megatron)
    if documents is not None:
        angles, mscale = documents.angles(indexer.rotary_pos_emb)
    else:
        # rotary_pos_emb takes the length of the whole sequence and returns the angles of this rank's tokens.
        angles, mscale = indexer.rotary_pos_emb(x.size(0) * exchange.parts * exchange.ranks), 1.0
        if isinstance(angles, tuple):  # YaRN
            angles, mscale = angles
    key = _normed(indexer, indexer.linear_wk(x)[0]).unsqueeze(2)  # [s, b, 1, index_dim]
    # [s, b, index_dim]
    key = hadamard(indexer._apply_rope(key, exchange.own_part(angles), mscale)).squeeze(2)
    gathered = exchange.gather(key, is_replicated=True)
    # Both scales go into the weights, as in Megatron: [s, b, index_heads]
    weights = indexer.linear_weights_proj(x)[0] * (indexer.index_n_heads**-0.5 * indexer.softmax_scale)
    if exchange.parts > 1:
        gather = megatron("core.tensor_parallel").gather_from_sequence_parallel_region
        group = indexer.pg_collection.tp
        qr = gather(qr, group=group)  # [s / tp, b, q_lora_rank] -> [s, b, q_lora_rank]
        # No reduce-scatter in backward: each rank computes the gradient of all tokens.
        weights = gather(weights, tensor_parallel_output_grad=False, group=group)  # [s, b, index_heads]
    # [s, b, index_heads * index_dim] -> [s, b, index_heads, index_dim]
    query = indexer.linear_wq_b(qr)[0].unflatten(-1, (indexer.index_n_heads, indexer.index_head_dim))
    query = hadamard(indexer._apply_rope(query, angles, mscale))
    use_relu = indexer.config.dsa_indexer_scoring_relu

    def wait() -> IndexInputs:
        whole, receiver = gathered.wait_with_receiver()  # [keys, b, index_dim]
        return IndexInputs.from_megatron(query, whole, weights, use_relu, receiver)

    return IndexUnderWay(wait, (gathered,))


def _normed(indexer: Any, key: Tensor) -> Tensor:
    if indexer.config.dsa_indexer_k_norm_fp32:
        return indexer.k_norm(key.float()).to(key.dtype)  # type: ignore[no-any-return]
    return indexer.k_norm(key)  # type: ignore[no-any-return]


def _hadamard(indexer: Any, megatron: Megatron) -> Callable[[Tensor], Tensor]:
    """Return the function for the indexer's Hadamard rotation; identity if the config turns it off."""
    if not indexer.config.dsa_indexer_rotate_activation:
        return lambda states: states
    rotate: Callable[[Tensor], Tensor] | None = getattr(indexer, "rotate_activation", None)
    if rotate is not None:
        return rotate
    return megatron("core.transformer.experimental_attention_variant.dsa").rotate_activation  # type: ignore[no-any-return]


def run_tapped(
    indexer: Any, x: Tensor, qr: Tensor, mask: Tensor | None, compute: bool, angles: Tensor | None = None
) -> tuple[IndexInputs, tuple[Any, Any]]:
    """Run Megatron's ``forward_with_scores`` and capture the arguments of its score function.

    Args:
        indexer: Megatron's ``DSAIndexer``.
        x: hidden states ``[sequence, batch, hidden]``, a rank's shard under sequence parallelism.
        qr: latent queries ``[sequence, batch, q_lora_rank]``, sharded like ``x``.
        mask: mask ``[sequence, sequence]`` to add to the scores; None for no mask.
        compute: whether to compute scores and selection.
        angles: rotary angles of packed documents' tokens, if there are documents.

    Returns:
        Indexer inputs (query, key and weights), and a tuple of scores and selection, both None without
        ``compute``.
    """
    with projecting(indexer, angles, compute) as projection:
        result = indexer.forward_with_scores(x, qr, mask=mask, packed_seq_params=None)
    assert projection.inputs is not None
    return projection.inputs, result
