"""Sparse attention with separate keys and values per head: MLA without absorption."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops.backend import (
    Algorithm,
    Call,
    ShapeClass,
    algorithm,
    choose,
    count_call,
    spent,
    takes_every_call,
)
from mindspeed_dsa.ops.checks import (
    check_float,
    check_heads,
    check_shape,
    check_topk_indices,
    checked_sink,
    require,
)
from mindspeed_dsa.ops.compiled import outside_graphs
from mindspeed_dsa.ops.precision import outside_autocast, without_autocast
from mindspeed_dsa.ops.sparse_flash_attention import cpu_dense, cpu_heads, sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.cpu_heads import HeadsCall

OPERATOR = "sparse_attention_by_head"
# Operator name under which these calls are counted.
_SHARED = "sparse_flash_attention"

# With fewer keys the gain is at most a few milliseconds, and none with narrow heads.
_FEWEST_KEYS = 256
# Maximum number of keys as a multiple of the selected keys. Beyond it, masking takes longer than gathering.
_MOST_TIMES = 17


def is_faster_by_head(
    device: torch.device, keys: int, topk: int, heads: int, widths: tuple[int, int], backend: str = "auto"
) -> bool:
    """Return whether attention by head is faster than in absorbed form.

    If all keys are selected, attention by head is faster on every device: it is dense, and its keys are
    narrower. On CPUs it is also faster up to a certain number of keys. Both forms compute the same function,
    forward and backward; their results differ by rounding.

    Args:
        device: device of the computation.
        keys: number of keys that the last query of causal attention sees.
        topk: number of keys that a query selects.
        heads: number of heads of this rank.
        widths: width of key and value together, by head and absorbed. (192 + 128, 576 + 512) for
            DeepSeek-V3.2, (256 + 256, 576 + 512) for GLM-5.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.
    """
    forms = (
        Algorithm("by head", sparse_attention_by_head, _is_slower),
        Algorithm("absorbed", sparse_flash_attention, takes_every_call),
    )
    return algorithm("sparse attention", forms, device, keys, topk, heads, widths, backend).name == "by head"


def _is_slower(
    device: torch.device, keys: int, topk: int, heads: int, widths: tuple[int, int], backend: str
) -> str | None:
    """Return why attention by head is slower than the absorbed form, or None."""
    most = _most_keys(topk, heads, widths)
    if keys <= topk or (_on_cpu(device, backend) and _FEWEST_KEYS <= keys <= most):
        return None
    if not _on_cpu(device, backend):
        return "it is faster where all keys are selected"
    times = most / max(topk, 1)
    return (
        f"it is faster where all keys are selected, and from {_FEWEST_KEYS} keys on up to {times:.1f} times "
        "as many as are selected"
    )


def _most_keys(topk: int, heads: int, widths: tuple[int, int]) -> float:
    """Return the number of keys up to which attention by head is faster, forward and backward together.

    Attention by head masks keys, and the absorbed form gathers them once for all heads, so more heads favor
    the absorbed form. The limit is ``cpu_dense.most_keys``, the limit between masking and gathering absorbed
    keys, times the ratio of widths, because keys by head are narrower. Measured on two busy cores of an x86,
    in processor time, as a multiple of ``topk``, in fp32 and bf16: with DeepSeek-V3.2's widths 14 with 16
    heads, 6 with 64 and 5 with 128; with GLM-5's widths 8 to 9 with 16 heads and 4 to 5 with 64.
    ``python -m benchmarks dsa --only forms`` repeats the measurement. The limit is not measured at run time,
    because all ranks, and all runs of a job, must use the same form.
    """
    by_head, absorbed = widths
    return min(cpu_dense.most_keys(heads, topk) * absorbed / by_head, float(_MOST_TIMES * topk))


@outside_graphs
@outside_autocast
def sparse_attention_by_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    *,
    sink: Tensor | None = None,
    return_attention_sum: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend with every head to the keys that its token selected, with separate keys and values per head.

    ``out[t, h] = sum_s p[t, h, s] * value[s, g]`` with ``p = softmax over the selected s`` of ``softmax_scale
    * query[t, h] . key[s, g]``, where ``g`` is the key-value head of head ``h``. On CPUs one call computes
    all heads. On other devices, or if there are many more keys than are selected, each key-value head is a
    call of :func:`mindspeed_dsa.ops.sparse_flash_attention.sparse_flash_attention`.

    Args:
        query: ``[batch, query_length, heads, dim]``.
        key: ``[batch, key_length, kv_heads, dim]``. ``kv_heads`` divides ``heads``; key-value head ``g``
            serves the ``heads / kv_heads`` heads from ``g * heads / kv_heads`` on.
        value: ``[batch, key_length, kv_heads, value_dim]``.
        topk_indices: ``[batch, query_length, topk]``, as in :func:`sparse_flash_attention`.
        softmax_scale: factor of the scores.
        sink: ``[heads]`` learnable logits, as in :func:`sparse_flash_attention`.
        return_attention_sum: whether to also return the probabilities summed over heads.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        The output, ``[batch, query_length, heads, value_dim]``; and the probabilities summed over heads,
        ``[batch, query_length, topk]`` in fp32 and not differentiable, or None if not requested. Both are
        zero for queries without a key.

    Raises:
        ValueError: a shape or dtype does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    check_shape(OPERATOR, "query", query, (None,) * 4, "[batch, query_length, heads, dim]")
    check_heads(OPERATOR, "query", query)
    batch, _, heads, dim = query.shape
    check_shape(OPERATOR, "key", key, (batch, None, None, dim), f"[{batch}, key_length, kv_heads, {dim}]")
    keys, kv_heads = key.shape[1:3]
    require(
        kv_heads > 0 and heads % kv_heads == 0,
        OPERATOR,
        f"{heads} heads cannot share {kv_heads} key-value heads evenly",
    )
    check_shape(
        OPERATOR, "value", value, (batch, keys, kv_heads, None), f"[{batch}, {keys}, {kv_heads}, value_dim]"
    )
    check_float(OPERATOR, query=query, key=key, value=value)
    check_topk_indices(OPERATOR, topk_indices, query, keys)
    sink = checked_sink(OPERATOR, sink, query)
    call = HeadsCall(query, key, value, topk_indices, softmax_scale, sink)
    forms = (
        Algorithm("for all heads in one call", _all_heads, _declines),
        Algorithm("head by head", _each_head, takes_every_call),
    )
    run = algorithm("attention by head", forms, call, backend).run
    output: tuple[Tensor, Tensor | None] = run(call, return_attention_sum, backend)
    return output


def _on_cpu(device: torch.device, backend: str) -> bool:
    return device.type == "cpu" and backend in ("auto", "cpu")


def _declines(call: HeadsCall, backend: str) -> str | None:
    """Return why :mod:`cpu_heads` does not take a call, or None."""
    if not _on_cpu(call.query.device, backend):
        return "the cpu backend alone has it"
    keys, topk = call.key.shape[1], call.topk_indices.shape[2]
    if not 0 < keys <= _MOST_TIMES * topk or call.query.numel() == 0:
        return f"it is faster up to {_MOST_TIMES} times as many keys as are selected"
    return cpu_heads.declines(call)


def _all_heads(call: HeadsCall, with_sum: bool, backend: str) -> tuple[Tensor, Tensor | None]:
    (_, _, heads, dim), value_dim = call.query.shape, call.value.shape[3]
    sizes = (("heads", heads), ("dim", dim), ("value_dim", value_dim))
    count_call(_SHARED, choose(_SHARED, "cpu", ShapeClass.of(call.query, *sizes)))
    repeats = heads // call.key.shape[2]
    if repeats > 1:
        # Autograd adds up the gradients of the heads that share a key.
        key, value = (x.repeat_interleave(repeats, dim=2) for x in (call.key, call.value))
        call = replace(call, key=key, value=value)
    out, attention_sum = _ByHead.apply(call, with_sum, call.query, call.key, call.value, call.sink)
    return out, attention_sum


def _each_head(call: HeadsCall, with_sum: bool, backend: str) -> tuple[Tensor, Tensor | None]:
    query, key, value = call.query, call.key, call.value
    # The operator has one key-value head whose value is the key's leading part. Each such head is a separate
    # call, with its value in front of its key, and zeros in front of its queries, so that the value does not
    # affect the scores.
    value_dim = value.shape[-1]
    group = query.shape[2] // key.shape[2]
    outputs, summed = [], None
    for head in range(key.shape[2]):
        heads = slice(head * group, (head + 1) * group)
        result = sparse_flash_attention(
            F.pad(query[:, :, heads], (value_dim, 0)),  # [batch, query_length, group, value_dim + dim]
            torch.cat([value[:, :, head], key[:, :, head]], dim=-1),  # [batch, key_length, value_dim + dim]
            call.topk_indices,
            call.softmax_scale,
            value_dim=value_dim,
            sink=None if call.sink is None else call.sink[heads],
            return_attention_sum=with_sum,
            backend=backend,
        )
        outputs.append(result.out)
        if result.attention_sum is not None:
            summed = result.attention_sum if summed is None else summed + result.attention_sum
    return torch.cat(outputs, dim=2), summed  # [batch, query_length, heads, value_dim]


class _ByHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: HeadsCall, with_sum: bool, *differentiable: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        with spent(_SHARED, call.query.device):
            out, attention_sum = cpu_heads.forward(call, with_sum)
        call.keep(ctx)
        if attention_sum is not None:
            ctx.mark_non_differentiable(attention_sum)
        ctx.set_materialize_grads(False)
        return out, attention_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad_out is None:
            return (None,) * 6
        (call,) = Call.kept(ctx)
        forms = (
            Algorithm("for all heads in one call", cpu_heads.backward, cpu_heads.declines_gradient),
            Algorithm("head by head", _gradients_of_each_head, takes_every_call),
        )
        with without_autocast(call.query.device.type), spent(_SHARED, call.query.device):
            run = algorithm("the gradient of attention by head", forms, call, grad_out).run
            return None, None, *run(call, grad_out)


def _gradients_of_each_head(call: HeadsCall, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by gathering keys, so that non-finite ``grad_out`` only reaches selected keys."""
    with torch.enable_grad():
        tensors = {"query": call.query, "key": call.key, "value": call.value, "sink": call.sink}
        leaves: dict[str, Any] = {
            name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None
        }
        out, _ = _each_head(replace(call, **leaves), False, "cpu")
        of_query, of_key, of_value, *of_sink = torch.autograd.grad(out, tuple(leaves.values()), grad_out)
        return of_query, of_key, of_value, of_sink[0] if of_sink else None
