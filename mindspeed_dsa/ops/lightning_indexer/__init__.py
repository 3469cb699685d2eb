"""Lightning Indexer: score all visible keys for every query token and select the best ``topk``.

README.md in this folder has the mathematics.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.backend import Call, ShapeClass, choose, count_call, plan, spent, unless_empty
from mindspeed_dsa.ops.checks import (
    check_finite,
    check_float,
    check_heads,
    check_shape,
    check_topk_indices,
    check_weights,
    require,
)
from mindspeed_dsa.ops.compiled import outside_graphs
from mindspeed_dsa.ops.lightning_indexer.protocol import GradientIndexer, Indexer, IndexerCall
from mindspeed_dsa.ops.precision import outside_autocast, without_autocast
from mindspeed_dsa.ops.row_ranges import Ranges, RowForm, form_of, visible_ranges

OPERATOR = "lightning_indexer"

if TYPE_CHECKING:  # mypy checks the modules against the protocol
    from mindspeed_dsa.ops.lightning_indexer import chunked, cpu, npu, reference, triton

    BACKENDS: tuple[Indexer, ...] = (reference, chunked, cpu, triton, npu)


class IndexerOutput(NamedTuple):
    """Selected keys and their scores."""

    topk_indices: Tensor
    """``[batch, query_length, topk]`` int32, ascending positions of keys, or numbers of pools, unless
    ``in_order`` is False; -1 at the tail."""
    topk_scores: Tensor
    """``[batch, query_length, topk]`` fp32 (fp64 from fp64), differentiable; -inf where the index is -1."""


@outside_graphs
@outside_autocast
def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    topk: int,
    *,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    use_relu: bool = True,
    pool: int = 1,
    key_receiver: Tensor | None = None,
    form: RowForm | None = None,
    cu_seqlens: Tensor | None = None,
    in_order: bool = True,
    backend: str = "auto",
) -> IndexerOutput:
    """Select the ``topk`` visible keys with the highest index score for every query token.

    ``score[t, s] = sum_j weights[t, j] * relu(query[t, j] . key[s])``, accumulated in fp32. Query ``t`` sees
    the keys ``starts[t] <= s < ends[t]`` and lists ``topk`` of them, or all if it sees fewer. Among equal
    scores the lower key position wins, so the selection depends only on the inputs: it is the same on every
    rank that holds them, and when the forward is recomputed. NaN ranks below every number, including -inf: a
    key with a NaN score is listed, with that score, only if the query sees fewer than ``topk`` numbers.
    Selection itself has no gradient; the scores at the selected entries have one.

    A batch without sequences, queries or keys gives empty results and zero gradients.

    Args:
        query: ``[batch, query_length, heads, head_dim]``, any strides; fp32, bf16, fp16 or fp64.
        key: ``[batch, key_length, head_dim]``, one key head.
        weights: ``[batch, query_length, heads]`` head weights of any sign, already multiplied with every
            scale.
        topk: number of keys to select per query, at least 1; the width of the result is
            ``min(topk, key_length)``, or with pools at most their number.
        starts: ``[query_length]`` or ``[batch, query_length]`` int, first visible key; default 0.
        ends: one past the last visible key, with the shape of ``starts``; default ``t + 1``, which requires
            as many queries as keys.
        use_relu: whether the product of each head is clamped at zero.
        pool: number of consecutive keys that are selected together. With more than one, the results are of
            pools: pool ``i`` has the keys ``i * pool .. i * pool + pool - 1``, its score is the highest of
            those that the query sees, and the gradient of that score goes to this key alone. ``topk`` counts
            pools. :func:`mindspeed_dsa.ops.dsa.keys_of_pools` lists their keys.
        key_receiver: tensor shaped like ``key`` in a wider dtype, never read. Backward gives the gradient of
            ``key`` to this tensor instead of ``key``, so that it is not rounded to the dtype of ``key``.
            Backends that autograd differentiates ignore this argument.
        form: host-side description of the visible ranges, given with ``starts`` and ``ends`` or instead of
            them. With it, the npu backend need not read the ranges from the device.
        cu_seqlens: ``[sequences + 1]`` int32, bounds of the whole batch's packed causal sequences, instead of
            ``starts``, ``ends`` and ``form``; see :meth:`.RowForm.of_cu_seqlens`.
        in_order: whether each query's keys must be ascending. Otherwise they may be in any order, with -1
            still at the tail, and npu need not sort them.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        :class:`IndexerOutput`.

    Raises:
        ValueError: a shape, dtype or range does not fit.
        BackendUnavailable: the requested backend cannot take the call.

    Source: DeepSeek-V3.2-Exp report, section 2.1, equation 1.
    """
    check_operands(OPERATOR, query, key, weights)
    require(topk >= 1, OPERATOR, f"topk must be at least 1, got {topk}")
    require(pool >= 1, OPERATOR, f"pool must be at least 1, got {pool}")
    batch, query_length = query.shape[:2]
    form = form_of(OPERATOR, cu_seqlens, form, batch, query_length, key.shape[1], starts, ends)
    ranges = visible_ranges(OPERATOR, batch, query_length, key.shape[1], starts, ends, query.device, form)
    selected: Indexer = choose(OPERATOR, backend, shape_class(query, topk))
    selected = unless_empty(OPERATOR, selected, query, key)
    # With fewer keys than topk the result is narrower, and every query lists all keys that it sees.
    topk = min(topk, -(-key.shape[1] // pool))
    call = IndexerCall(query, key, weights, use_relu, pool)
    planned = selected.plan_call(call, topk, ranges, in_order)
    implementation, planned = plan(OPERATOR, backend, selected, planned)
    count_call(OPERATOR, implementation)
    if implementation.KIND == "autograd":
        return IndexerOutput(*implementation.lightning_indexer(call, topk, ranges))
    call = replace(call, plan=planned)
    if pool > 1:
        return _select_pools(implementation, call, topk, ranges, key_receiver)
    return IndexerOutput(
        *_Select.apply(implementation, call, topk, ranges, key_receiver, query, key, weights)
    )


def _select_pools(
    implementation: GradientIndexer,
    call: IndexerCall,
    topk: int,
    ranges: Ranges,
    key_receiver: Tensor | None,
) -> IndexerOutput:
    """Select pools; their scores are recomputed as those of their best keys if a gradient is needed."""
    operands = call.query, call.key, call.weights
    with torch.no_grad(), spent(OPERATOR, call.query.device):
        selected = IndexerOutput(*implementation.select(call, topk, ranges))
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in operands)):
        return selected
    with torch.no_grad(), spent(OPERATOR, call.query.device):
        pools = selected.topk_indices[..., None]
        # The keys of the selected pools: [batch, query_length, topk, pool]
        keys = pools * call.pool + torch.arange(call.pool, dtype=torch.int32, device=pools.device)
        starts, ends = (bound[..., None, None] for bound in ranges[:2])
        keys.masked_fill_((pools < 0) | (keys < starts) | (keys >= ends), -1)
        scores = implementation.scores_at(call, keys.flatten(-2)).view(keys.shape)
        best = keys.gather(-1, scores.argmax(dim=-1, keepdim=True)).squeeze(-1)
    return selected._replace(topk_scores=_ScoresAt.apply(implementation, call, best, key_receiver, *operands))


@outside_graphs
@outside_autocast
def selected_scores(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    topk_indices: Tensor,
    *,
    use_relu: bool = True,
    key_receiver: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the index scores, as in :func:`lightning_indexer`, of the keys in ``topk_indices``.

    Args:
        query: ``[batch, query_length, heads, head_dim]``.
        key: ``[batch, key_length, head_dim]``.
        weights: ``[batch, query_length, heads]``.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64, any strides, -1 at the tail. Any other
            entry outside ``[0, key_length)`` is treated like -1, and is an error with debug checks on
            (:func:`mindspeed_dsa.ops.checks.set_debug_checks`).
        use_relu: whether the product of each head is clamped at zero.
        key_receiver: receiver of the key's gradient, see :func:`lightning_indexer`.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        ``[batch, query_length, topk]`` fp32 (fp64 for fp64 inputs), -inf where the index names no key, NaN
        where the score is NaN; differentiable with respect to query, key and weights. Without queries it is
        empty, and gradients are zero.

    Raises:
        ValueError: a shape or dtype does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    check_operands(OPERATOR, query, key, weights)
    check_topk_indices(OPERATOR, topk_indices, query, key.shape[1])
    shape = shape_class(query, topk_indices.shape[-1])
    selected: Indexer = choose(OPERATOR, backend, shape)
    implementation = unless_empty(OPERATOR, selected, query, key)
    count_call(OPERATOR, implementation)
    call = IndexerCall(query, key, weights, use_relu)
    if implementation.KIND == "autograd":
        return implementation.selected_scores(call, topk_indices)
    return _ScoresAt.apply(implementation, call, topk_indices, key_receiver, query, key, weights)


def check_operands(operator: str, query: Tensor, key: Tensor, weights: Tensor) -> None:
    """Raise ``ValueError`` unless the operands fit :func:`lightning_indexer`.

    Checks shapes and dtypes, and with debug checks on also that all numbers are finite.
    """
    check_shape(operator, "query", query, (None,) * 4, "[batch, query_length, heads, head_dim]")
    check_heads(operator, "query", query)
    batch, query_length, heads, head_dim = query.shape
    check_shape(operator, "key", key, (batch, None, head_dim), f"[{batch}, key_length, {head_dim}]")
    check_shape(
        operator, "weights", weights, (batch, query_length, heads), f"[{batch}, {query_length}, {heads}]"
    )
    check_float(operator, query=query, key=key)
    check_weights(operator, "weights", weights, query)
    check_finite(operator, query=query, key=key, weights=weights)


def shape_class(query: Tensor, topk: int) -> ShapeClass:
    """Return the shape class by which the indexer's backends are selected."""
    heads, head_dim = query.shape[2:]
    return ShapeClass.of(query, ("heads", heads), ("head_dim", head_dim), ("topk", topk))


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        implementation: GradientIndexer,
        call: IndexerCall,
        topk: int,
        ranges: Ranges,
        key_receiver: Tensor | None,
        *differentiable: Tensor,
    ) -> tuple[Tensor, Tensor]:
        with spent(OPERATOR, call.query.device):
            topk_indices, topk_scores = implementation.select(call, topk, ranges)
        ctx.implementation, ctx.receives = implementation, key_receiver is not None
        call.keep(ctx, topk_indices)
        ctx.mark_non_differentiable(topk_indices)
        # Missing gradients arrive as None, so that backward can return at once.
        ctx.set_materialize_grads(False)
        return topk_indices, topk_scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, grad_scores: Tensor | None) -> tuple[Any, ...]:
        if grad_scores is None:
            return (None,) * 8
        call, topk_indices = Call.kept(ctx)
        with without_autocast(grad_scores.device.type), spent(OPERATOR, grad_scores.device):
            of_query, of_key, of_weights = ctx.implementation.score_gradients(call, topk_indices, grad_scores)
        # With a receiver, the key's gradient goes there unrounded, and the key itself gets None.
        if ctx.receives:
            return None, None, None, None, of_key, of_query, None, of_weights
        return None, None, None, None, None, of_query, of_key.to(call.key.dtype), of_weights


class _ScoresAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        implementation: GradientIndexer,
        call: IndexerCall,
        topk_indices: Tensor,
        key_receiver: Tensor | None,
        *differentiable: Tensor,
    ) -> Tensor:
        ctx.implementation, ctx.receives = implementation, key_receiver is not None
        call.keep(ctx, topk_indices)
        with spent(OPERATOR, call.query.device):
            return implementation.scores_at(call, topk_indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Any, ...]:
        call, topk_indices = Call.kept(ctx)
        with without_autocast(grad_scores.device.type), spent(OPERATOR, grad_scores.device):
            of_query, of_key, of_weights = ctx.implementation.score_gradients(call, topk_indices, grad_scores)
        if ctx.receives:
            return None, None, None, of_key, of_query, None, of_weights
        return None, None, None, None, of_query, of_key.to(call.key.dtype), of_weights
