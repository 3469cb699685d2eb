"""Indexer loss: Kullback-Leibler divergence from the main attention to the indexer's distribution.

README.md in this folder has the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.backend import check_name, choose, count_call, plan, spent, unless_empty, warn_once
from mindspeed_dsa.ops.checks import check_shape, check_topk_indices, checked_sink, names_key, require
from mindspeed_dsa.ops.compiled import outside_graphs
from mindspeed_dsa.ops.indexer_kl_loss.chunked import divergence_and_gradient
from mindspeed_dsa.ops.indexer_kl_loss.protocol import (
    OPERATOR,
    DenseCall,
    GradientLoss,
    Loss,
    SparseCall,
    check_inputs,
    check_supplied,
    over_ranks,
    row_weights_of,
    shape_class,
    shape_of_entries,
)
from mindspeed_dsa.ops.lightning_indexer import selected_scores
from mindspeed_dsa.ops.lightning_indexer.protocol import IndexerCall
from mindspeed_dsa.ops.precision import outside_autocast, wide
from mindspeed_dsa.ops.row_ranges import RowForm, form_of, visible_ranges
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall

if TYPE_CHECKING:  # mypy checks the modules against the protocol
    from mindspeed_dsa.ops.indexer_kl_loss import chunked, cpu, npu, reference, triton

    BACKENDS: tuple[Loss, ...] = (reference, chunked, cpu, triton, npu)

_LAST_KEY = 2**31  # If the number of keys is not known, any non-negative int32 may be one.


@outside_graphs
@outside_autocast
def indexer_kl_loss(
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    *,
    sink: Tensor | None = None,
    lse: Tensor | None = None,
    topk_scores: Tensor | None = None,
    attention_sum: Tensor | None = None,
    row_mask: Tensor | None = None,
    reduction: str = "mean",
    tp_group: dist.ProcessGroup | None = None,
    use_relu: bool = True,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    form: RowForm | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the loss of the sparse stage, in which both distributions are over the selected keys.

    ``loss_t = sum_s p (log p - log r)`` where ``r`` is the softmax of the index scores over the selected
    keys. ``p`` is the main attention over them, summed over the heads of all ranks of ``tp_group`` and
    normalized. The gradient of the scores is exactly ``r - p``. ``query`` and ``key`` get no gradient. NaN in
    the scores or the attention makes the loss NaN. Without queries or keys the loss is 0, and so are the
    gradients.

    Args:
        index_query: ``[batch, query_length, index_heads, index_dim]`` query of the indexer.
        index_key: ``[batch, key_length, index_dim]`` key of the indexer.
        index_weights: ``[batch, query_length, index_heads]`` head weights of the indexer.
        query: ``[batch, query_length, heads, dim]``, this rank's heads of the main (absorbed) query.
        key: ``[batch, key_length, dim]``, latent followed by the rotary key.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64, any strides, -1 at the tail; a query
            without a key contributes nothing. Any other entry outside ``[0, key_length)`` is treated like -1,
            and is an error with debug checks on (:func:`mindspeed_dsa.ops.checks.set_debug_checks`).
        softmax_scale: factor of the main attention's scores.
        sink: ``[heads]`` logits of the main attention, if it has them; gets no gradient.
        lse: ``[batch, query_length, heads]`` log-sum-exp from the attention over the same keys; saves a pass.
        topk_scores: index scores at ``topk_indices``, differentiable, as the indexer returned them; saves
            their recomputation. The gradient then flows through them. With a backend that has one operator
            for the whole loss (npu), it goes to the indexer's inputs instead.
        attention_sum: ``[batch, query_length, topk]`` attention probabilities summed over this rank's heads,
            as the attention returned them. With it they are not computed again.
        row_mask: ``[batch, query_length]`` bool, True for queries that count (all by default).
        reduction: ``"mean"`` or ``"sum"`` over the queries that count.
        tp_group: tensor-parallel process group whose ranks hold the other heads.
        use_relu: whether the indexer clamps the product of each head at zero.
        query_rope: rotary part of the query, see
            :func:`mindspeed_dsa.ops.sparse_flash_attention.sparse_flash_attention`.
        key_rope: rotary part of the key, only together with ``query_rope``.
        form: host-side description of each query's visible keys. Valid only if every query lists all its
            visible keys up to ``topk``; see
            :func:`mindspeed_dsa.ops.sparse_flash_attention.sparse_flash_attention`.
        cu_seqlens: ``[sequences + 1]`` int32, bounds of the whole batch's packed causal sequences, instead of
            a form; see :meth:`.RowForm.of_cu_seqlens`.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        Scalar, fp32 (fp64 for an indexer in fp64).

    Raises:
        ValueError: a shape, dtype or option does not fit.
        BackendUnavailable: the requested backend cannot take the call.

    Source: DeepSeek-V3.2-Exp report, section 2.1, equation 4.
    """
    # Stand-ins for the concatenated tensors, without memory, for the checks and the selection of a backend.
    whole = query if query_rope is None else _as_wide("query_rope", query, query_rope)
    require(key_rope is None or query_rope is not None, OPERATOR, "key_rope without query_rope; pass both")
    whole_key = key if key_rope is None else _as_wide("key_rope", key, key_rope)
    rows = check_inputs(index_query, index_key, index_weights, whole, whole_key, False)
    check_topk_indices(OPERATOR, topk_indices, query, key.shape[1])
    form = form_of(OPERATOR, cu_seqlens, form, *rows, key.shape[1])
    if form is not None:
        form.check(OPERATOR, *rows, key.shape[1])
    check_supplied(topk_indices, query.shape[2], lse, topk_scores=topk_scores, attention_sum=attention_sum)
    shape = shape_class(index_query, whole, topk_indices.shape[-1])
    selected: Loss = choose(OPERATOR, backend, shape)
    implementation = unless_empty(OPERATOR, selected, query, key)
    count_call(OPERATOR, implementation)
    # One operator may compute the target, the loss and the gradients of the indexer's inputs. It bypasses the
    # scores, so if only the scores need a gradient, the other path is taken.
    only_scores = topk_scores is not None and topk_scores.requires_grad and not index_query.requires_grad
    attention = AttentionCall(query, key, topk_indices, softmax_scale, whole.shape[3], query_rope, key_rope)
    attention = replace(attention, sink=_sink_of(sink, query))
    if attention_sum is None and not only_scores and implementation.KIND == "fused":
        index = IndexerCall(index_query, index_key, index_weights, use_relu)
        call = SparseCall(index, attention, lse, row_mask, tp_group)
        planned = implementation.plan_fused(call, form)
        if not isinstance(planned, str):
            row_weight = row_weights_of(rows, None, reduction, query.new_empty(0, dtype=torch.float32))[0, 0]
            return implementation.fused_loss(
                replace(call, attention=replace(attention, plan=planned)), row_weight
            )
        warn_once(f"{OPERATOR}: computed by PyTorch in chunks: {planned}")
    if topk_scores is None:
        topk_scores = selected_scores(
            index_query, index_key, index_weights, topk_indices, use_relu=use_relu, backend=backend
        )
    with torch.no_grad():
        if attention_sum is None:
            attention = attention.whole()
            with spent(OPERATOR, query.device):
                attention_sum = implementation.attention_sum(attention, lse)
            if tp_group is not None:
                dist.all_reduce(attention_sum, group=tp_group)
        else:
            attention_sum = over_ranks(attention_sum, tp_group)
        row_weights = row_weights_of(rows, row_mask, reduction, topk_scores)
    valid = names_key(topk_indices, key.shape[1])
    if implementation.KIND == "autograd":
        return implementation.divergence(topk_scores, attention_sum, valid, row_weights)
    with torch.no_grad(), spent(OPERATOR, topk_scores.device):
        loss, gradient = implementation.divergence_and_gradient(
            topk_scores, attention_sum, valid, row_weights, topk_scores.requires_grad
        )
    return _WithGradients.apply((loss, (gradient,)), topk_scores)


def _as_wide(name: str, latent: Tensor, rope: Tensor) -> Tensor:
    """Return a stand-in for ``latent`` and ``rope`` concatenated, valid for checks of shape and dtype."""
    rows = tuple(latent.shape[:-1])
    check_shape(OPERATOR, name, rope, (*rows, None), f"[{', '.join(map(str, rows))}, rope]")
    return latent[..., :1].expand(*rows, latent.shape[-1] + rope.shape[-1])  # [..., dim + rope], a view


def _sink_of(sink: Tensor | None, query: Tensor) -> Tensor | None:
    sink = checked_sink(OPERATOR, sink, query)
    return None if sink is None else sink.detach()


def takes_lse(index_query: Tensor, query: Tensor, topk: int, *, backend: str = "auto") -> bool:
    """Return whether :func:`indexer_kl_loss` should get the attention's ``lse`` instead of ``attention_sum``.

    True if one operator computes target, loss and gradients (npu), which would not use ``attention_sum``.

    Args:
        index_query: query of the indexer, as for :func:`indexer_kl_loss`.
        query: query of the main attention, as for :func:`indexer_kl_loss`.
        topk: number of entries per query.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.
    """
    selected: Loss = choose(OPERATOR, backend, shape_class(index_query, query, topk))
    return selected.KIND == "fused"


@outside_graphs
@outside_autocast
def divergence_and_score_gradient(
    topk_scores: Tensor,
    attention_sum: Tensor,
    topk_indices: Tensor,
    *,
    row_mask: Tensor | None = None,
    reduction: str = "mean",
    tp_group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the loss of the sparse stage and its gradient with respect to the scores, outside autograd.

    Computes the same as :func:`indexer_kl_loss` with ``topk_scores`` and ``attention_sum``. Use it if
    ``attention_sum`` is only available in the backward, as in the ``score_gradient`` callback of
    :func:`mindspeed_dsa.ops.sparse_flash_attention.sparse_flash_attention`.

    Args:
        topk_scores: ``[batch, query_length, topk]`` as the indexer returned them.
        attention_sum: probabilities summed over this rank's heads, same shape; not modified.
        topk_indices: key positions, same shape, int32 or int64, -1 at the tail. An index outside the keys
            contributes nothing. Since the number of keys is not an argument, these entries are recognized by
            their score of -inf and sum of 0.
        row_mask: ``[batch, query_length]`` bool, True for queries that count (all by default).
        reduction: ``"mean"`` or ``"sum"`` over the queries that count.
        tp_group: tensor-parallel process group whose ranks hold the other heads. All of its ranks must call.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`. All backends except the reference
            and triton use the same closed form in PyTorch.

    Returns:
        The loss, a scalar in the dtype of the scores, and its gradient, ``[batch, query_length, topk]``.

    Raises:
        ValueError: a shape or option does not fit.
        BackendUnavailable: triton was requested and cannot run.
    """
    check_shape(OPERATOR, "topk_scores", topk_scores, (None,) * 3, "[batch, query_length, topk]")
    batch, query_length, topk = topk_scores.shape
    for name, tensor in (("attention_sum", attention_sum), ("topk_indices", topk_indices)):
        check_shape(OPERATOR, name, tensor, (batch, query_length, topk), f"{[batch, query_length, topk]}")
    check_topk_indices(OPERATOR, topk_indices, topk_scores, _LAST_KEY)
    check_name(OPERATOR, backend)
    with torch.no_grad():
        row_weights = row_weights_of((batch, query_length), row_mask, reduction, topk_scores)
        attention_sum = over_ranks(attention_sum, tp_group)
        # An index outside the keys has attention 0 and score -inf: 0 log 0, which contributes nothing.
        valid = (topk_indices >= 0) & ((topk_scores != -torch.inf) | (attention_sum != 0))
        if backend != "reference":
            form = _closed_form(topk_scores, backend)
            loss, gradient = form(topk_scores, attention_sum, valid, row_weights, True)
            assert gradient is not None
            return loss, gradient
    from mindspeed_dsa.ops.indexer_kl_loss import reference

    with torch.enable_grad():
        scores = topk_scores.detach().requires_grad_()
        loss = reference.divergence(scores, attention_sum, valid, row_weights)
        (gradient,) = torch.autograd.grad(loss, scores)
    return loss.detach(), gradient


def kl_loss_of_scores(
    topk_scores: Tensor,
    attention_sum: Tensor,
    topk_indices: Tensor,
    *,
    row_mask: Tensor | None = None,
    reduction: str = "mean",
    tp_group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the loss of the sparse stage, differentiable with respect to ``topk_scores``.

    For layers that reuse another layer's selection: they have its scores, but not the operands of its
    indexer. Arguments and errors are as for :func:`divergence_and_score_gradient`.

    Returns:
        The loss, a scalar in the dtype of the scores.
    """
    loss, gradient = divergence_and_score_gradient(
        topk_scores,
        attention_sum,
        topk_indices,
        row_mask=row_mask,
        reduction=reduction,
        tp_group=tp_group,
        backend=backend,
    )
    return _WithGradients.apply((loss, (gradient,)), topk_scores)


def _closed_form(
    topk_scores: Tensor, backend: str
) -> Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]:
    """Return the function for divergence and gradient in closed form: Triton's on a GPU, else PyTorch's."""
    if backend == "triton" or (backend == "auto" and topk_scores.is_cuda):
        # The kernel is one launch, where PyTorch needs about 20 per block.
        # The call only has entries, so no number of heads or dimensions can exceed a limit.
        selected: GradientLoss = choose(OPERATOR, backend, shape_of_entries(topk_scores))
        return selected.divergence_and_gradient
    return divergence_and_gradient


@outside_graphs
@outside_autocast
def dense_indexer_kl_loss(
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    *,
    sink: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    row_mask: Tensor | None = None,
    reduction: str = "mean",
    tp_group: dist.ProcessGroup | None = None,
    use_relu: bool = True,
    form: RowForm | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the loss of the warm-up stage, in which both distributions are over all visible keys.

    Scores are streamed in blocks of queries; no tensor of size query_length x key_length is held. If any
    gradient of the indexer's inputs is needed, it is computed in the forward, where the blocks are available.
    NaN in the scores or the attention makes the loss NaN. Without queries or keys the loss is 0, and so are
    the gradients.

    Args:
        index_query: ``[batch, query_length, index_heads, index_dim]`` query of the indexer.
        index_key: ``[batch, key_length, index_dim]`` key of the indexer.
        index_weights: ``[batch, query_length, index_heads]`` head weights of the indexer.
        query: ``[batch, query_length, heads, dim]``, this rank's heads.
        key: ``[batch, key_length, dim]`` shared by all heads (absorbed MLA), or
            ``[batch, key_length, heads, dim]``. For DeepSeek-V3.2 the latter has 192 instead of 576
            dimensions, a third of the work.
        softmax_scale: factor of the main attention's scores.
        sink: ``[heads]`` logits of the main attention, if it has them; gets no gradient.
        starts: first visible key of each query, as in :func:`mindspeed_dsa.ops.lightning_indexer`.
        ends: one past the last visible key of each query.
        row_mask: ``[batch, query_length]`` bool, True for queries that count (all by default).
        reduction: ``"mean"`` or ``"sum"`` over the queries that count.
        tp_group: tensor-parallel process group whose ranks hold the other heads, the same number on each
            rank.
        use_relu: whether the indexer clamps the product of each head at zero.
        form: host-side description of the visible ranges, given with ``starts`` and ``ends`` or instead of
            them. With it, the npu backend need not read the ranges from the device.
        cu_seqlens: ``[sequences + 1]`` int32, bounds of the whole batch's packed causal sequences, instead of
            ``starts``, ``ends`` and ``form``; see :meth:`.RowForm.of_cu_seqlens`.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        Scalar, fp32 (fp64 for an indexer in fp64).

    Raises:
        ValueError: a shape, dtype or option does not fit.
        BackendUnavailable: the requested backend cannot take the call.

    Source: DeepSeek-V3.2-Exp report, section 2.1, equation 3.
    """
    rows = check_inputs(index_query, index_key, index_weights, query, key, True)
    form = form_of(OPERATOR, cu_seqlens, form, *rows, key.shape[1], starts, ends)
    ranges = visible_ranges(OPERATOR, *rows, key.shape[1], starts, ends, query.device, form)
    shape = shape_class(index_query, query, 0, query.shape[2] if key.dim() == 4 else 1)
    selected: Loss = choose(OPERATOR, backend, shape)
    implementation = unless_empty(OPERATOR, selected, query, key)
    like = index_query.new_empty(0, dtype=wide(index_query.dtype))
    row_weights = row_weights_of(rows, row_mask, reduction, like)
    index = IndexerCall(index_query, index_key, index_weights, use_relu)
    main = query.detach(), key.detach(), softmax_scale, ranges, row_weights, tp_group, _sink_of(sink, query)
    call = DenseCall(index, *main)
    planned = implementation.plan_dense(call, row_mask)
    implementation, planned = plan(OPERATOR, backend, implementation, planned)
    count_call(OPERATOR, implementation)
    call = replace(call, plan=planned)
    if implementation.KIND == "gradients":
        inputs = index_query, index_key, index_weights
        with torch.no_grad(), spent(OPERATOR, query.device):
            known = implementation.dense_loss_and_gradients(call, any(x.requires_grad for x in inputs))
        return _WithGradients.apply(known, *inputs)
    return implementation.dense_loss(call)


class _WithGradients(torch.autograd.Function):
    """Autograd function of a loss whose gradients are already known."""

    @staticmethod
    def forward(
        ctx: Any, known: tuple[Tensor, Sequence[Tensor | None] | None], *differentiable: Tensor
    ) -> Tensor:
        loss, gradients = known  # in a tuple, because autograd returns an argument as a view
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensor.dtype for tensor in differentiable]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Any, ...]:
        scaled = (x * grad_loss.to(x.dtype) for x in ctx.saved_tensors)
        return None, *(x.to(dtype) for x, dtype in zip(scaled, ctx.dtypes, strict=True))
