"""Sparse flash attention: every query token attends to its selected keys only, in absorbed MLA form.

README.md in this folder has the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.backend import Call, ShapeClass, choose, count_call, plan, spent, unless_empty
from mindspeed_dsa.ops.checks import (
    check_float,
    check_heads,
    check_shape,
    check_topk_indices,
    checked_sink,
    require,
)
from mindspeed_dsa.ops.compiled import outside_graphs
from mindspeed_dsa.ops.precision import outside_autocast, wide, without_autocast
from mindspeed_dsa.ops.row_ranges import RowForm, form_of
from mindspeed_dsa.ops.sparse_flash_attention.protocol import (
    Attention,
    AttentionCall,
    GradientAttention,
    sink_gradient,
)

OPERATOR = "sparse_flash_attention"

if TYPE_CHECKING:  # mypy checks the modules against the protocol
    from mindspeed_dsa.ops.sparse_flash_attention import chunked, cpu, npu, reference, triton

    BACKENDS: tuple[Attention, ...] = (reference, chunked, cpu, triton, npu)


class SparseAttentionOutput(NamedTuple):
    """Output of the attention; only ``out`` is differentiable."""

    out: Tensor
    """``[batch, query_length, heads, value_dim]`` in the dtype of the query; zero without a key."""
    lse: Tensor
    """``[batch, query_length, heads]`` fp32, natural log of the sum of exp(scores), and of exp(sink) if there
    is a sink; without a key -inf, or the sink."""
    attention_sum: Tensor | None
    """``[batch, query_length, topk]`` fp32, probabilities summed over this rank's heads, 0 where the index
    names no key: the unnormalized target of the indexer loss. None unless requested."""


@outside_graphs
@outside_autocast
def sparse_flash_attention(
    query: Tensor,
    key_value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    *,
    value_dim: int,
    sink: Tensor | None = None,
    return_attention_sum: bool = False,
    topk_scores: Tensor | None = None,
    score_gradient: Callable[[Tensor], Tensor] | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    key_receiver: Tensor | None = None,
    key_rope_receiver: Tensor | None = None,
    form: RowForm | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> SparseAttentionOutput:
    """Attend from every query head to the keys that its token selected, with one shared key-value head.

    ``out[t, h] = sum_s p[t, h, s] * key_value[s, :value_dim]`` with ``p = softmax over the selected s`` of
    ``softmax_scale * query[t, h] . key_value[s]``. The value is the leading (latent) part of the key; the
    gradients of both roles are added. Gradients are deterministic in the reference and on CPU. With triton
    the gradient of ``key_value`` is deterministic only under ``torch.use_deterministic_algorithms(True)``.
    NaN in a query or a selected key makes the dependent results NaN.

    With a sink, the softmax has one more entry, which has no value: ``p = exp(score) /
    (exp(sink) + sum exp(scores))``.

    Queries that name no key give zeros and an ``lse`` of -inf (the sink, if there is one); in a call without
    keys this holds for all of them. A batch without sequences or queries gives empty results. All gradients
    are zero in these cases.

    Args:
        query: ``[batch, query_length, heads, dim]``, at least one head, any strides. For MLA, the query
            absorbed into the latent space followed by its rotary part, ``dim = 512 + 64``.
        key_value: ``[batch, key_length, dim]``, latent followed by the rotary key.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64 key positions without duplicates, any
            strides, -1 at the tail, otherwise in any order. They alone define visibility (causal, packed).
            Any other entry outside ``[0, key_length)`` is treated like -1, and is an error with debug checks
            on (:func:`mindspeed_dsa.ops.checks.set_debug_checks`).
        softmax_scale: factor of the scores. For MLA the scale of the unabsorbed heads, ``192 ** -0.5`` times
            the square of the YaRN factor, not ``576 ** -0.5``.
        value_dim: size of the leading part of ``key_value`` that is the value, 512 for MLA.
        sink: ``[heads]`` learnable logits, any floating dtype, differentiable. Its gradient is
            ``-sum_t p_sink[t] * (dO[t] . out[t])``.
        return_attention_sum: whether to also return the probabilities summed over heads.
        topk_scores: ``[batch, query_length, topk]`` index scores at ``topk_indices``. They do not affect the
            forward; in the backward their gradient is the return value of ``score_gradient``.
        score_gradient: callback for the indexer loss. Each backward calls it once with the probabilities
            summed over this rank's heads, ``[batch, query_length, topk]`` fp32, which the backward recomputes
            anyway. It returns the gradient of ``topk_scores``, same shape, which is not multiplied with the
            incoming gradient. It is not called if ``topk_scores`` requires no gradient, nor by a backward
            that does not reach the scores, such as ``torch.autograd.grad(out, key_value)``. Two backwards
            through a retained graph call it twice: gradients are right, but side effects such as logging
            happen twice. It should not hold a reference to this function's results, because the two would
            keep each other alive. Typically it calls
            :func:`mindspeed_dsa.ops.indexer_kl_loss.divergence_and_score_gradient`.
        query_rope: rotary part of the query, ``[batch, query_length, heads, rope]``, if it is a separate
            tensor; ``query`` is then the part before it. npu takes both as they are, other backends
            concatenate them.
        key_rope: rotary part of the key, ``[batch, key_length, rope]``, if it is a separate tensor too;
            ``key_value`` is then the part before it, ``[batch, key_length, value_dim]``.
        key_receiver: tensor shaped like ``key_value`` in a wider dtype, never read. Backward gives the
            gradient of ``key_value`` to this tensor instead of ``key_value``, so that it is not rounded to
            the dtype of ``key_value``. Backends that autograd differentiates ignore this argument, and so do
            backends that concatenate ``key_rope`` with the key.
        key_rope_receiver: tensor with the same role for ``key_rope``.
        form: host-side description of each query's visible keys. Valid only if every query lists all its
            visible keys up to ``topk``, as selections by the indexer do. With it, the npu backend need not
            read the indices from the device.
        cu_seqlens: ``[sequences + 1]`` int32, bounds of the whole batch's packed causal sequences, instead of
            a form; see :meth:`.RowForm.of_cu_seqlens`.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        :class:`SparseAttentionOutput`.

    Raises:
        ValueError: a shape or dtype does not fit, including the shape of the tensor that ``score_gradient``
            returned.
        BackendUnavailable: the requested backend cannot take the call.

    Source: DeepSeek-V2 paper, section 2.1 (absorbed MLA); DeepSeek-V3.2-Exp report, section 2.1.
    """
    check_shape(OPERATOR, "query", query, (None,) * 4, "[batch, query_length, heads, dim]")
    check_heads(OPERATOR, "query", query)
    batch, rows, heads, dim = query.shape
    if query_rope is not None:
        check_shape(
            OPERATOR,
            "query_rope",
            query_rope,
            (batch, rows, heads, None),
            f"[{batch}, {rows}, {heads}, rope]",
        )
        check_float(OPERATOR, query=query, query_rope=query_rope)
        dim += query_rope.shape[3]
    key_dim = dim
    if key_rope is not None:
        require(query_rope is not None, OPERATOR, "key_rope without query_rope; pass both, or none")
        check_shape(
            OPERATOR,
            "key_rope",
            key_rope,
            (batch, key_value.shape[1], dim - query.shape[3]),
            f"[{batch}, {key_value.shape[1]}, {dim - query.shape[3]}]",
        )
        check_float(OPERATOR, query=query, key_rope=key_rope)
        key_dim = query.shape[3]
    shape_of_keys = f"[{batch}, key_length, {key_dim}]"
    check_shape(OPERATOR, "key_value", key_value, (batch, None, key_dim), shape_of_keys)
    check_float(OPERATOR, query=query, key_value=key_value)
    check_topk_indices(OPERATOR, topk_indices, query, key_value.shape[1])
    form = form_of(OPERATOR, cu_seqlens, form, batch, rows, key_value.shape[1])
    if form is not None:
        form.check(OPERATOR, batch, rows, key_value.shape[1])
    require(1 <= value_dim <= dim, OPERATOR, f"value_dim must lie in [1, {dim}], got {value_dim}")
    require(
        key_rope is None or value_dim == key_dim,
        OPERATOR,
        f"the key before key_rope is the value: value_dim must be {key_dim}, got {value_dim}",
    )
    require(
        (topk_scores is None) == (score_gradient is None),
        OPERATOR,
        "topk_scores and score_gradient go together; pass both or none",
    )
    if topk_scores is not None:
        check_shape(
            OPERATOR, "topk_scores", topk_scores, tuple(topk_indices.shape), "as large as topk_indices"
        )
    sink = checked_sink(OPERATOR, sink, query)
    sizes = (("heads", heads), ("dim", dim), ("value_dim", value_dim), ("topk", topk_indices.shape[-1]))
    shape = ShapeClass.of(query, *sizes)
    selected: Attention = choose(OPERATOR, backend, shape)
    selected = unless_empty(OPERATOR, selected, query, key_value)
    call = AttentionCall(query, key_value, topk_indices, softmax_scale, value_dim, query_rope, key_rope, sink)
    implementation, planned = plan(OPERATOR, backend, selected, selected.plan_call(call, form))
    count_call(OPERATOR, implementation)
    call = replace(call, plan=planned)
    if not (implementation.KIND == "gradients" and implementation.TAKES_PARTS):
        call = call.whole()
        if key_rope is not None:
            # A receiver for the concatenated key would be a new tensor as large as a gradient.
            key_receiver = key_rope_receiver = None
    # If no gradient of the scores is needed, the sum is not computed.
    hooked = topk_scores is not None and topk_scores.requires_grad and torch.is_grad_enabled()
    receiver = None
    if hooked:
        receiver = _SumReceiver.apply(topk_scores, score_gradient, wide(query.dtype))
    if implementation.KIND == "gradients":
        return SparseAttentionOutput(
            *_Attention.apply(
                implementation,
                call,
                return_attention_sum,
                receiver,
                key_receiver,
                key_rope_receiver,
                call.query,
                call.query_rope,
                call.key_value,
                call.key_rope,
                call.sink,
            )
        )
    out, lse, attention_sum = implementation.sparse_flash_attention(call, return_attention_sum or hooked)
    if hooked:
        out = _SendSum.apply(out, receiver, attention_sum)
    return SparseAttentionOutput(out, lse, attention_sum if return_attention_sum else None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        implementation: GradientAttention,
        call: AttentionCall,
        return_attention_sum: bool,
        receiver: Tensor | None,
        key_receiver: Tensor | None,
        key_rope_receiver: Tensor | None,
        *differentiable: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with spent(OPERATOR, call.query.device):
            out, lse, attention_sum = implementation.forward(call, return_attention_sum)
        ctx.implementation = implementation
        ctx.hooked = receiver is not None
        ctx.receives = key_receiver is not None, key_rope_receiver is not None
        call.keep(ctx, out, lse)
        ctx.mark_non_differentiable(lse, *(() if attention_sum is None else (attention_sum,)))
        ctx.set_materialize_grads(False)
        return out, lse, attention_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
        call, out, lse = Call.kept(ctx)
        if grad_out is None:
            if not ctx.hooked:
                return (None,) * 11
            # Only the indexer loss needs this backward.
            grad_out = torch.zeros_like(out)  # [batch, query_length, heads, value_dim]
        with without_autocast(out.device.type), spent(OPERATOR, out.device):
            of_query, of_key, attention_sum = ctx.implementation.backward(
                call, grad_out, out, lse, ctx.hooked
            )
        of_sink = None
        if call.sink is not None and ctx.needs_input_grad[10]:
            of_sink = sink_gradient(call.sink, grad_out, out, lse)
        of_query = (of_query, None) if call.query_rope is None else of_query
        of_keys = (of_key, None) if call.key_rope is None else of_key
        # With a receiver, the gradient goes there unrounded, and the key itself gets None.
        receivers = [one if receives else None for one, receives in zip(of_keys, ctx.receives, strict=True)]
        keys = [
            None if receives or one is None else one.to(call.key_value.dtype)
            for one, receives in zip(of_keys, ctx.receives, strict=True)
        ]
        return None, None, None, attention_sum, *receivers, *of_query, *keys, of_sink


class _SumReceiver(torch.autograd.Function):
    """Autograd node of ``topk_scores``: its backward calls ``score_gradient`` with the attention sum.

    The attention sum is the probabilities summed over heads. The attention's backward returns it as the
    "gradient" of this node's output. Because the node is separate, autograd skips it in backward passes that
    do not need the gradient of the scores.
    """

    @staticmethod
    def forward(
        ctx: Any, topk_scores: Tensor, score_gradient: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        ctx.score_gradient, ctx.scores_dtype = score_gradient, topk_scores.dtype
        ctx.set_materialize_grads(False)
        # The attention never reads it, so one number is enough memory. Its dtype is the sum's.
        return topk_scores.new_zeros(1, dtype=dtype).expand(topk_scores.shape)  # [batch, query_length, topk]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, attention_sum: Tensor | None) -> tuple[Any, ...]:
        if attention_sum is None:
            return None, None, None
        return _checked_gradient(ctx.score_gradient, attention_sum, ctx.scores_dtype), None, None


class _SendSum(torch.autograd.Function):
    """Identity on ``out`` whose backward passes the attention sum to :class:`_SumReceiver`.

    The attention sum is the probabilities that the forward summed over heads. Used for backends that autograd
    differentiates.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, receiver: Tensor, attention_sum: Tensor) -> Tensor:
        ctx.save_for_backward(attention_sum)
        ctx.set_materialize_grads(False)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Any, ...]:
        (attention_sum,) = ctx.saved_tensors
        # A clone, because the callback may modify its argument, and a second backward must not see that.
        return grad_out, attention_sum.clone(), None


def _checked_gradient(
    score_gradient: Callable[[Tensor], Tensor], attention_sum: Tensor, dtype: torch.dtype
) -> Tensor:
    """Call ``score_gradient`` and check the shape of its result."""
    gradient = score_gradient(attention_sum)
    check_shape(
        OPERATOR,
        "what score_gradient returned",
        gradient,
        tuple(attention_sum.shape),
        f"{list(attention_sum.shape)} as topk_scores",
    )
    return gradient.to(dtype)
