"""Functional DeepSeek Sparse Attention for one layer: key selection, attention, and the indexer's loss."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_dsa.ops.checks import check_float, check_shape, checked_sink, require
from mindspeed_dsa.ops.compiled import outside_graphs
from mindspeed_dsa.ops.dense_attention import dense_attention, dense_attention_backward
from mindspeed_dsa.ops.documents import attend_by_documents
from mindspeed_dsa.ops.indexer_kl_loss import (
    dense_indexer_kl_loss,
    indexer_kl_loss,
    kl_loss_of_scores,
    takes_lse,
)
from mindspeed_dsa.ops.lightning_indexer import IndexerOutput, lightning_indexer
from mindspeed_dsa.ops.precision import outside_autocast
from mindspeed_dsa.ops.row_ranges import Ranges, RowForm, form_of, visible_ranges
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.by_head import sparse_attention_by_head
from mindspeed_dsa.ops.sparse_flash_attention.protocol import add_sink, sink_gradient

OPERATOR = "deepseek_sparse_attention"

Stage = Literal["sparse", "warmup", "warm-up"]
"""Stages of DSA's training, DeepSeek-V3.2-Exp report, section 2.1.1.

``sparse``: queries attend to the keys that the indexer selects, and its loss compares distributions on these.
``warmup``: queries attend to all visible keys, and the loss covers the same keys; nothing is selected.
``warm-up`` is the former spelling, which remains valid.
"""


class DSAOutput(NamedTuple):
    """Output of the attention of one layer."""

    out: Tensor
    """``[batch, rows, heads, value_dim]`` in the dtype of the query; zero for queries without a key."""
    loss: Tensor | None
    """Scalar, fp32 (fp64 for an indexer in fp64), differentiable only with respect to the indexer's operands,
    or to given scores without operands. None unless requested."""
    topk_indices: Tensor | None
    """``[batch, rows, topk]`` int32, -1 at the tail; None if queries attend to all visible keys."""


@outside_graphs
@outside_autocast
def deepseek_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    index_query: Tensor | None,
    index_key: Tensor | None,
    index_weights: Tensor | None,
    *,
    topk: int,
    softmax_scale: float,
    value_dim: int | None = None,
    sink: Tensor | None = None,
    stage: Stage = "sparse",
    with_loss: bool = False,
    selected: IndexerOutput | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    form: RowForm | None = None,
    cu_seqlens: Tensor | None = None,
    row_mask: Tensor | None = None,
    reduction: str = "mean",
    tp_group: ProcessGroup | None = None,
    use_relu: bool = True,
    backend: str = "auto",
) -> DSAOutput:
    """Select keys for every query token, attend to them, and optionally compute the indexer's loss.

    The output is differentiable with respect to query, key and value, the loss with respect to the indexer's
    operands. As in DeepSeek's training, the output trains the main model and the loss trains the indexer. If
    no query can see more than ``topk`` keys, selection is skipped, and attention and loss are dense, which
    gives the same results.

    By head (``value`` given), every head has its own keys and values. In absorbed form (``value`` None) all
    heads share the latent key, whose leading ``value_dim`` dimensions are the value.
    :func:`mindspeed_dsa.ops.sparse_flash_attention.by_head.is_faster_by_head` tells which form is faster.

    Args:
        query: ``[batch, rows, heads, dim]``; fp32, bf16, fp16 or fp64. ``rows`` is the number of query
            tokens.
        key: ``[batch, keys, heads, dim]``, or absorbed ``[batch, keys, dim]``.
        value: ``[batch, keys, heads, value_dim]``, with ``value_dim`` at most ``dim``; None in absorbed form.
        index_query: ``[batch, rows, index_heads, index_dim]`` query of the indexer. The three ``index_*``
            arguments may be None if neither a selection nor a loss is needed, or if ``selected`` has the
            scores for a loss on the selected keys.
        index_key: ``[batch, keys, index_dim]`` key of the indexer.
        index_weights: ``[batch, rows, index_heads]`` head weights of the indexer, already multiplied with
            every scale; may be fp32 with bf16 queries.
        topk: number of keys to select per query, at least 1.
        softmax_scale: factor of the attention's scores.
        value_dim: size of the leading part of an absorbed key that is its value; None for keys by head.
        sink: ``[heads]`` learnable logits in the denominator of the softmax; differentiable.
        stage: training stage, see :data:`Stage`.
        with_loss: whether to compute the indexer's loss. Without it the indexer gets no gradient.
        selected: previous selection to reuse, with its scores if there is a loss: the indexer's output for
            these operands, or another layer's keys. Without ``index_*`` arguments the loss is the
            divergence from the softmax of these scores, and its gradient goes to them: a layer that reuses
            another layer's selection thus trains the other layer's indexer.
        starts: ``[rows]`` or ``[batch, rows]`` int, first visible key of each query; default 0.
        ends: one past the last visible key, with the shape of ``starts``; default: causal, with as many keys
            as queries.
        form: replacement for ``starts`` and ``ends``. ``RowForm(lengths)`` for packed documents: the lengths
            of all documents of the batch in order, where no document spans two batch rows. ``RowForm()`` for
            causal queries at the end of a longer key sequence, as with a KV cache.
        cu_seqlens: ``[sequences + 1]`` int32, bounds of the whole batch's packed causal sequences, instead of
            ``starts``, ``ends`` and ``form``; see :meth:`.RowForm.of_cu_seqlens`.
        row_mask: ``[batch, rows]`` bool, True for queries that count in the loss (all by default).
        reduction: ``"mean"`` or ``"sum"`` of the loss over the queries that count.
        tp_group: process group whose ranks hold the other heads, for the loss.
        use_relu: whether the indexer clamps the product of each head at zero.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        :class:`DSAOutput`.

    Raises:
        ValueError: a shape, dtype or option does not fit.
        BackendUnavailable: the requested backend cannot take the call.

    Source: DeepSeek-V3.2-Exp report, section 2.1.
    """
    require(stage in get_args(Stage), OPERATOR, f"stage must be 'sparse' or 'warmup', got {stage!r}")
    require(topk >= 1, OPERATOR, f"topk must be at least 1, got {topk}")
    check_shape(OPERATOR, "query", query, (None,) * 4, "[batch, rows, heads, dim]")
    batch, rows, heads, dim = query.shape
    absorbed = value is None
    require(
        key.dim() == (3 if absorbed else 4),
        OPERATOR,
        f"keys are [batch, keys, dim] without a value and [batch, keys, heads, dim] with one, got "
        f"{list(key.shape)} {'without' if absorbed else 'with'} one",
    )
    require(
        absorbed == (value_dim is not None),
        OPERATOR,
        "value_dim goes with an absorbed key, whose leading part is the value; pass it there alone",
    )
    keys = key.shape[1]
    # Dense attention would broadcast mismatched shapes, and truncate a value that is wider than its key.
    if value is None:
        check_shape(OPERATOR, "key", key, (batch, None, dim), f"[{batch}, keys, {dim}]")
        check_float(OPERATOR, query=query, key=key)
        require(
            value_dim is not None and 1 <= value_dim <= dim,
            OPERATOR,
            f"value_dim must lie in [1, {dim}], got {value_dim}",
        )
    else:
        check_shape(OPERATOR, "key", key, (batch, None, heads, dim), f"[{batch}, keys, {heads}, {dim}]")
        shape = f"[{batch}, {keys}, {heads}, value_dim]"
        check_shape(OPERATOR, "value", value, (batch, keys, heads, None), shape)
        check_float(OPERATOR, query=query, key=key, value=value)
        width = value.shape[-1]
        require(width <= dim, OPERATOR, f"values may be no wider than keys, {dim}; got {width}")
    form = form_of(OPERATOR, cu_seqlens, form, batch, rows, keys, starts, ends)
    if form is not None:
        require(
            starts is None and ends is None, OPERATOR, "a form says starts and ends; pass one or the other"
        )
    ranges = visible_ranges(OPERATOR, batch, rows, keys, starts, ends, query.device, form)
    row_options: dict[str, Any] = {"form": ranges.form}
    if not ranges.plain_causal:
        row_options |= {"starts": ranges.starts, "ends": ranges.ends}
    loss_options: dict[str, Any] = {
        "row_mask": row_mask,
        "reduction": reduction,
        "tp_group": tp_group,
        "use_relu": use_relu,
        "backend": backend,
    }
    longest = max(form.sequences, default=0) if form is not None and form.sequences is not None else keys
    # Without a sequence longer than topk, every query would select all keys that it sees.
    dense = is_dense(stage) or (longest <= topk and selected is None)
    # Scores of a given selection are enough for the loss on its keys.
    of_scores = (
        with_loss
        and not dense
        and index_query is None
        and selected is not None
        and selected.topk_scores is not None
    )
    if (with_loss and not of_scores) or not (dense or selected is not None):
        if index_query is None or index_key is None or index_weights is None:
            raise ValueError(
                f"{OPERATOR}: a selection and the loss need the indexer's query, key and weights; "
                "on selected keys, the loss can take their scores in place of them"
            )
        index = index_query, index_key, index_weights
    if dense:
        out = attend_to_visible(query, key, value, softmax_scale, ranges, value_dim, sink, backend)
        if not with_loss:
            return DSAOutput(out, None, None)
        loss = dense_indexer_kl_loss(
            index[0],
            index[1],
            index[2],
            query.detach(),
            key.detach(),
            softmax_scale,
            sink=sink,
            **row_options,
            **loss_options,
        )
        return DSAOutput(out, loss, None)

    if selected is None:
        with torch.set_grad_enabled(with_loss and torch.is_grad_enabled()):
            # Neither the attention nor the loss depends on the order of the keys.
            selected = lightning_indexer(
                *index, topk, **row_options, use_relu=use_relu, in_order=False, backend=backend
            )
    # A given selection of another width need not list min(topk, visible keys) keys, as a form promises.
    form = ranges.form if selected.topk_indices.shape[-1] == min(topk, keys) else None
    # npu's fused loss computes its target from the log-sum-exp instead of the sum.
    with_sum = of_scores or (
        with_loss and not (absorbed and takes_lse(index[0], query, topk, backend=backend))
    )
    out, attention_sum, lse = attend_to_selected(
        query,
        key,
        value,
        selected.topk_indices,
        softmax_scale,
        value_dim,
        sink=sink,
        form=form,
        with_sum=with_sum,
        backend=backend,
    )
    if not with_loss:
        return DSAOutput(out, None, selected.topk_indices)
    if of_scores:
        assert attention_sum is not None, "requested above"
        del loss_options["use_relu"]
        loss = kl_loss_of_scores(selected.topk_scores, attention_sum, selected.topk_indices, **loss_options)
        return DSAOutput(out, loss, selected.topk_indices)
    loss = indexer_kl_loss(
        index[0],
        index[1],
        index[2],
        query.detach(),
        # The key is not read if the sum is given; by head there is no single key.
        key.detach() if absorbed else key.detach()[:, :, 0],
        selected.topk_indices,
        softmax_scale,
        sink=sink,
        lse=lse,
        topk_scores=selected.topk_scores,
        attention_sum=attention_sum,
        form=form,
        **loss_options,
    )
    return DSAOutput(out, loss, selected.topk_indices)


def is_dense(stage: Stage) -> bool:
    """Return whether queries attend to all visible keys in a stage."""
    return stage != "sparse"


def attend_to_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    topk_indices: Tensor,
    softmax_scale: float,
    value_dim: int | None = None,
    *,
    sink: Tensor | None = None,
    form: RowForm | None = None,
    with_sum: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend to the keys in ``topk_indices``; other arguments as for :func:`deepseek_sparse_attention`.

    Returns:
        Output; probabilities summed over heads if requested, else None; log-sum-exp in absorbed form, else
        None. See :class:`mindspeed_dsa.ops.sparse_flash_attention.SparseAttentionOutput`.
    """
    if value is None:
        assert value_dim is not None, "checked by the caller"
        attended = sparse_flash_attention(
            query,
            key,
            topk_indices,
            softmax_scale,
            value_dim=value_dim,
            sink=sink,
            return_attention_sum=with_sum,
            form=form,
            backend=backend,
        )
        return attended.out, attended.attention_sum, attended.lse
    out, attention_sum = sparse_attention_by_head(
        query,
        key,
        value,
        topk_indices,
        softmax_scale,
        sink=sink,
        return_attention_sum=with_sum,
        backend=backend,
    )
    return out, attention_sum, None


def attend_to_visible(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    softmax_scale: float,
    ranges: Ranges,
    value_dim: int | None = None,
    sink: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend to all visible keys; arguments as for :func:`deepseek_sparse_attention`.

    Causal queries use ``scaled_dot_product_attention``, and packed documents use it once per document. To
    find documents, the ranges are read on the host. Other ranges, such as windows, use the sparse operator
    with a list of all visible keys. So do absorbed heads on accelerators, because dense kernels do not
    support heads this wide. With a sink, causal queries use the operator of dense attention, and all others
    the sparse one.

    Returns:
        Output, ``[batch, rows, heads, value_dim]``.
    """
    if value is None:
        assert value_dim is not None, "checked by the caller"
        if query.device.type != "cpu":
            return _attend_to_listed(query, key, None, softmax_scale, ranges, value_dim, sink, backend)
        # The whole key serves as value: a narrower value would be padded, per head, to the width of the key.
        heads = key[:, :, None].expand(-1, -1, query.shape[2], -1)  # [batch, keys, heads, dim], a view
        out = attend_to_visible(query, heads, heads, softmax_scale, ranges, sink=sink, backend=backend)
        return out[..., :value_dim]
    if ranges.plain_causal and sink is not None:
        sink = checked_sink(OPERATOR, sink, query)
        causal: Tensor = _CausalWithSink.apply(query, key, value, sink, softmax_scale)
        return causal
    if ranges.plain_causal:
        # scaled_dot_product_attention's fused kernels require values as wide as keys.
        padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))  # [batch, keys, heads, dim]
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),  # [batch, heads, rows, dim]
            key.transpose(1, 2),  # [batch, heads, keys, dim]
            padded.transpose(1, 2),  # [batch, heads, keys, dim]
            is_causal=True,
            scale=softmax_scale,
        )
        return out.transpose(1, 2)[..., : value.shape[-1]]  # [batch, rows, heads, value_dim]
    if sink is not None or not query.numel() or not _are_documents(ranges.starts.cpu(), ranges.ends.cpu()):
        return _attend_to_listed(query, key, value, softmax_scale, ranges, None, sink, backend)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))  # [rows or keys, batch, heads, dim]
    outputs = [
        attend_by_documents(
            query[:, b : b + 1], key[:, b : b + 1], value[:, b : b + 1], *bounds, softmax_scale
        )
        for b, bounds in enumerate(zip(ranges.starts, ranges.ends, strict=True))
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)  # [batch, rows, heads, value_dim]


class _CausalWithSink(torch.autograd.Function):
    """Dense causal attention with a sink: the sink's share is taken from output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor, softmax_scale: float
    ) -> Tensor:
        out, lse = dense_attention(query, key, value, softmax_scale, causal=True)
        lse = add_sink(sink, lse, out)
        ctx.softmax_scale = softmax_scale
        ctx.save_for_backward(query, key, value, sink, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        query, key, value, sink, out, lse = ctx.saved_tensors
        grad_out = grad_out.contiguous()  # the operator needs a contiguous last axis
        gradients = dense_attention_backward(
            grad_out, query, key, value, out, lse, ctx.softmax_scale, causal=True
        )
        of_sink = sink_gradient(sink, grad_out, out, lse)
        return *(x.to(query.dtype) for x in gradients), of_sink, None


def _are_documents(starts: Tensor, ends: Tensor) -> bool:
    """Return whether the ranges of every sequence form documents, each after the previous one.

    Rows without visible keys (padding) may be between documents, but not inside one.
    """
    for first, end in zip(starts, ends, strict=True):
        # Runs of rows with the same start; -1 for rows that see nothing.
        begins, counts = torch.unique_consecutive(first.where(first < end, -1), return_counts=True)
        reach = torch.stack([rows.max() for rows in end.split(counts.tolist())])  # [runs]
        begins, reach = begins[begins >= 0], reach[begins >= 0]
        if (begins[1:] < reach[:-1]).any():
            return False
    return True


def _attend_to_listed(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    softmax_scale: float,
    ranges: Ranges,
    value_dim: int | None,
    sink: Tensor | None,
    backend: str,
) -> Tensor:
    """List every query's visible keys, padded to the longest range, and attend with the sparse operator."""
    starts, ends = (bound[..., None] for bound in ranges[:2])  # [batch, rows, 1]
    longest = key.shape[1] if ranges.plain_causal or not ends.numel() else max(int((ends - starts).max()), 1)
    # Positions ascend from each row's start, with -1 at the tail: [batch, rows, longest]
    position = torch.arange(longest, dtype=torch.int32, device=key.device) + starts
    visible = position.where(position < ends, -1)
    return attend_to_selected(
        query, key, value, visible, softmax_scale, value_dim, sink=sink, form=ranges.form, backend=backend
    )[0]
