"""Dense attention to a subset of the keys, with a log-sum-exp for merging with other subsets.

README.md in this folder has the mathematics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass, choose, count_call, unless_empty
from mindspeed_dsa.ops.checks import check_float, check_heads, check_shape, require
from mindspeed_dsa.ops.dense_attention.backends import DenseAttention, DenseCall, Npu, PartsCall
from mindspeed_dsa.ops.precision import outside_autocast

OPERATOR = "dense_attention"


@outside_autocast
@torch.no_grad()
def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_scale: float,
    *,
    causal: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend to a subset of the keys; return the output and the log-sum-exp for merging with other subsets.

    ``out[t, h] = sum_s p[t, h, s] * value[s, g]`` with ``p = softmax over s`` of
    ``softmax_scale * query[t, h] . key[s, g]``, where ``g`` is the key-value head of query head ``h``. It is
    not differentiable: callers merge subsets first, then use :func:`dense_attention_backward`.

    Args:
        query: ``[batch, query_length, heads, dim]``, any strides with contiguous last axis.
        key: ``[batch, key_length, kv_heads, dim]``, any strides with contiguous last axis. ``kv_heads``
            divides ``heads``; key-value head ``g`` serves the ``heads / kv_heads`` query heads from
            ``g * heads / kv_heads`` on.
        value: ``[batch, key_length, kv_heads, value_dim]``, any strides with contiguous last axis.
        softmax_scale: factor of the scores.
        causal: whether query ``t`` sees the keys ``0 .. t``, with as many queries as keys. Otherwise each
            query sees all keys.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        ``out`` ``[batch, query_length, heads, value_dim]`` in the dtype of the query, and ``lse``
        ``[batch, query_length, heads]`` fp32 (fp64 for fp64), natural log of the sum of exp(scores). Without
        keys they are zero and -inf.

    Raises:
        ValueError: a shape or dtype does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    implementation = _implementation(query, key, value, causal, backend)
    count_call(OPERATOR, implementation)
    return implementation.forward(DenseCall(query, key, value, softmax_scale, causal))


@outside_autocast
@torch.no_grad()
def dense_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    *,
    causal: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value due to one subset of the keys.

    ``out`` and ``lse`` are the results for all keys that a query sees, merged from all subsets. The
    recomputed probabilities are then final, and the query gradients of all subsets can be added.

    Args:
        grad_out: gradient of ``out``, in its shape and dtype.
        query: query of :func:`dense_attention`.
        key: keys of this subset.
        value: values of this subset.
        out: ``[batch, query_length, heads, value_dim]`` merged output, in the dtype of the query.
        lse: ``[batch, query_length, heads]`` merged log-sum-exp.
        softmax_scale: factor of the scores, as in the forward.
        causal: whether the mask is causal, as in the forward.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        Gradients of query, key and value in their shapes. Their dtype is the backend's: the query's or a
        wider one. The gradient of a key-value head is summed over the query heads that read it.

    Raises:
        ValueError: a shape or dtype does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    implementation = _implementation(query, key, value, causal, backend)
    expected = (*query.shape[:3], value.shape[3])
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        check_shape(OPERATOR, name, tensor, expected, f"{list(expected)}")
    check_shape(OPERATOR, "lse", lse, tuple(query.shape[:3]), f"{list(query.shape[:3])}")
    check_float(OPERATOR, query=query, out=out, grad_out=grad_out)
    call = DenseCall(query, key, value, softmax_scale, causal)
    return implementation.backward(call, grad_out, out, lse)


def takes_parts(plain: Tensor, rope: int, value_dim: int) -> bool:
    """Return whether a fused operator accepts separate rotary parts of query and key for these sizes.

    Args:
        plain: queries without their rotary part, ``[..., dim]``; keys have the same width.
        rope: width of the rotary part.
        value_dim: width of values.
    """
    return Npu().declines_parts(plain.device.type, plain.dtype, plain.shape[-1], rope, value_dim) is None


@outside_autocast
@torch.no_grad()
def attention_of_parts(
    query: Tensor,
    query_rope: Tensor,
    key: Tensor,
    key_rope: Tensor,
    value: Tensor,
    softmax_scale: float,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute causal attention to all keys, with rotary parts of query and key as separate tensors.

    Scores are ``softmax_scale * (query . key + query_rope . key_rope)``. Operators that accept separate
    rotary parts get them (:func:`takes_parts`); for other backends they are concatenated.

    Args:
        query: ``[batch, rows, heads, dim]``.
        query_rope: ``[batch, rows, heads, rope]``.
        key: ``[batch, rows, heads, dim]``.
        key_rope: ``[batch, rows, 1, rope]``, shared by all heads.
        value: ``[batch, rows, heads, value_dim]``.
        softmax_scale: factor of the scores.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        ``out`` ``[batch, rows, heads, value_dim]`` in the dtype of the query, and the softmax statistics for
        :func:`attention_of_parts_backward`, fp32 or wider, in a layout specific to the backend.

    Raises:
        ValueError: a shape or dtype does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    call = PartsCall(query, query_rope, key, key_rope, value, softmax_scale)
    implementation = _implementation_of_parts(call, backend)
    count_call(OPERATOR, implementation)
    return implementation.forward_of_parts(call)


@outside_autocast
@torch.no_grad()
def attention_of_parts_backward(
    grad_out: Tensor,
    query: Tensor,
    query_rope: Tensor,
    key: Tensor,
    key_rope: Tensor,
    value: Tensor,
    out: Tensor,
    statistics: Tensor,
    softmax_scale: float,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of :func:`attention_of_parts`.

    Args:
        grad_out: gradient of ``out``, in its shape and dtype.
        query: query of :func:`attention_of_parts`, without its rotary part.
        query_rope: rotary part of the query.
        key: key without its rotary part.
        key_rope: rotary part of the key, shared by all heads.
        value: values of these keys.
        out: output of :func:`attention_of_parts`.
        statistics: softmax statistics from :func:`attention_of_parts`.
        softmax_scale: factor of the scores, as in the forward.
        backend: name, as in the forward.

    Returns:
        Gradients of query, query_rope, key, key_rope and value in their shapes, in the dtype of the query or
        a wider one. The gradient of ``key_rope`` is summed over heads.

    Raises:
        ValueError: a shape or dtype does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    call = PartsCall(query, query_rope, key, key_rope, value, softmax_scale)
    return _implementation_of_parts(call, backend).backward_of_parts(call, grad_out, out, statistics)


def _implementation_of_parts(call: PartsCall, backend: str) -> DenseAttention:
    query, key, heads, rope = call.query, call.key, call.query.shape[2], call.query_rope.shape[-1]
    for name, tensor, shape in (
        ("query_rope", call.query_rope, (*query.shape[:3], None)),
        ("key_rope", call.key_rope, (*key.shape[:2], 1, rope)),
        ("key", key, (None, None, heads, None)),
    ):
        check_shape(OPERATOR, name, tensor, shape, f"[{', '.join(map(str, shape))}]")
    check_float(OPERATOR, query=query, query_rope=call.query_rope, key_rope=call.key_rope)
    return _implementation(query, key, call.value, True, backend, rope)


def _implementation(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, backend: str, rope: int = 0
) -> DenseAttention:
    check_shape(OPERATOR, "query", query, (None,) * 4, "[batch, query_length, heads, dim]")
    check_heads(OPERATOR, "query", query)
    batch, rows, heads, dim = query.shape
    check_shape(OPERATOR, "key", key, (batch, None, None, dim), f"[{batch}, key_length, kv_heads, {dim}]")
    keys, kv_heads = key.shape[1:3]
    check_shape(
        OPERATOR, "value", value, (batch, keys, kv_heads, None), f"[{batch}, {keys}, {kv_heads}, value_dim]"
    )
    check_heads(OPERATOR, "value", value)
    check_float(OPERATOR, query=query, key=key, value=value)
    require(heads % kv_heads == 0, OPERATOR, f"{heads} heads cannot share {kv_heads} key-value heads evenly")
    require(
        not causal or rows == keys,
        OPERATOR,
        f"causal rows come with as many keys, got {rows} rows and {keys} keys; cut them into parts",
    )
    sizes = (("heads", heads), ("kv_heads", kv_heads), ("dim", dim + rope), ("value_dim", value.shape[3]))
    selected: DenseAttention = choose(OPERATOR, backend, ShapeClass.of(query, *sizes))
    return unless_empty(OPERATOR, selected, query, key, value)
