"""CPU kernels of torch_npu's fused attention, written from its manual; the manual's limits raise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

calls: list[tuple[str, int, int]] = []
"""Operator, number of rows and of keys."""


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: None = None,
    padding_mask: None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: None = None,
    actual_seq_qlen: None = None,
    actual_seq_kvlen: None = None,
    sparse_mode: int = 0,
    *unused: Any,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    assert keep_prob == 1.0
    name = "npu_fusion_attention"
    scores = _scores(name, query, key, value, head_num, input_layout, atten_mask, scale, sparse_mode)
    maximum = scores.amax(dim=-1, keepdim=True)
    weights = (scores - maximum).exp()
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.einsum("bhts,bshd->bthd", weights / total, _repeated(value, head_num))
    return (
        out.to(query.dtype),
        # The operator repeats each statistic eight times.
        maximum.expand(-1, -1, -1, 8).contiguous(),
        total.expand(-1, -1, -1, 8).contiguous(),
        query.new_empty(0),
        0,
        0,
        0,
    )


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    sparse_mode: int = 0,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    assert not more, more
    name = "npu_fusion_attention_grad"
    scores = _scores(name, query, key, value, head_num, input_layout, atten_mask, scale_value, sparse_mode)
    assert softmax_max is not None
    assert softmax_sum is not None
    assert attention_in is not None
    for statistic in (softmax_max, softmax_sum):
        assert (statistic.shape, statistic.dtype) == ((*scores.shape[:3], 8), torch.float32)
        assert statistic.is_contiguous()
    for states in (dy, attention_in):
        assert states.is_contiguous()
        assert (states.shape, states.dtype) == ((*query.shape[:3], value.shape[3]), query.dtype)
    probabilities = (scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    keys, values, grad = _repeated(key, head_num), _repeated(value, head_num), dy.float()
    delta = (grad * attention_in.float()).sum(-1).transpose(1, 2)[..., None]
    grad_scores = probabilities * (torch.einsum("bthd,bshd->bhts", grad, values) - delta)
    gradients = (
        scale_value * torch.einsum("bhts,bshd->bthd", grad_scores, keys),
        _summed(scale_value * torch.einsum("bhts,bthd->bshd", grad_scores, query.float()), key),
        _summed(torch.einsum("bhts,bthd->bshd", probabilities, grad), value),
    )
    found = [one.to(query.dtype) for one in gradients]
    return found[0], found[1], found[2], None, torch.empty(0)


def npu_fusion_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: None = None,
    padding_mask: None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    *more: Any,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, ...]:
    """Compute the operator behind torch's scaled_dot_product_attention: heads before rows, any mask."""
    assert input_layout == "BNSD"
    scores = _masked(query, key, atten_mask, scale, more[7] if len(more) > 7 else sparse_mode)
    maximum = scores.amax(dim=-1, keepdim=True)
    weights = (scores - maximum).exp()
    total = weights.sum(dim=-1, keepdim=True)
    out = ((weights / total) @ value.float()).to(query.dtype)
    statistics = [each.expand(*scores.shape[:3], 8).contiguous() for each in (maximum, total)]
    state = torch.zeros(1, dtype=torch.int64)
    return out, *statistics, query.new_empty(0), state, state.clone()


def npu_fusion_attention_grad_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    sparse_mode: int = 0,
    **more: Any,
) -> tuple[Tensor | None, ...]:
    assert input_layout == "BNSD"
    scores = _masked(query, key, atten_mask, scale_value, sparse_mode)
    probabilities = (scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    grad = dy.float()
    delta = (grad * attention_in.float()).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad @ value.float().mT - delta) * scale_value
    gradients = (grad_scores @ key.float(), grad_scores.mT @ query.float(), probabilities.mT @ grad)
    return *(each.to(query.dtype) for each in gradients), None, torch.empty(0)


def _masked(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, sparse_mode: int) -> Tensor:
    """Return scores ``[batch, heads, rows, keys]`` in fp32, -inf where masked."""
    scores = scale * (query.float() @ key.float().mT)
    if mask is None:
        return scores
    rows, keys = scores.shape[-2:]
    if sparse_mode in (2, 3):  # compressed masks: causal from the upper left, or from the lower right
        mask = torch.ones(rows, keys, dtype=torch.bool).triu(1 + (keys - rows if sparse_mode == 3 else 0))
    return scores.masked_fill(mask.bool(), -torch.inf)


def npu_fusion_attention_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    scale: float = 1.0,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Attend to equally long sequences with separate rotary parts, the only form that is called here."""
    wide, options = _in_one_piece(query, key, value, input_layout, **more)
    out, maximum, total, *rest = npu_fusion_attention(*wide, head_num, "BSND", scale=scale, **options)
    calls[-1] = ("npu_fusion_attention_v2", *calls[-1][1:])
    # [N, T, 8] in memory by default, of shape [T, N, 8].
    maximum, total = (
        one.transpose(0, 1).contiguous().view(len(query), head_num, 8) for one in (maximum, total)
    )
    return out.flatten(0, 1), maximum, total, *rest  # type: ignore[return-value]


def npu_fusion_attention_grad_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    **more: Any,
) -> tuple[Tensor | None, ...]:
    wide, options = _in_one_piece(query, key, value, input_layout, **more)
    batch, rows, _, dim = wide[0].shape
    for one in (softmax_max, softmax_sum):
        assert (one.shape, one.dtype, one.is_contiguous()) == ((len(query), head_num, 8), torch.float32, True)
    maximum, total = (
        one.view(head_num, batch, rows, 8).transpose(0, 1).contiguous() for one in (softmax_max, softmax_sum)
    )
    gradients = npu_fusion_attention_grad(
        *wide,
        dy.unflatten(0, (batch, rows)),
        head_num,
        "BSND",
        softmax_max=maximum,
        softmax_sum=total,
        attention_in=attention_in.unflatten(0, (batch, rows)),
        scale_value=scale_value,
        **options,
    )
    calls[-1] = ("npu_fusion_attention_grad_v2", *calls[-1][1:])
    sizes = [query.shape[2], dim - query.shape[2]]
    parts = [part for one in gradients[:2] for part in one.split(sizes, dim=-1)]
    of_query, of_query_rope, of_key, of_key_rope = (one.flatten(0, 1).contiguous() for one in parts)
    return of_query, of_key, gradients[2].flatten(0, 1), None, of_query_rope, of_key_rope, torch.empty(0)


def _in_one_piece(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: str,
    *,
    atten_mask: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
    sparse_mode: int,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Join parts to ``[b, rows, heads, dim]``; raise where the manual excludes a call with rotary parts."""
    assert layout == "TND", "rotary parts are for TND only"
    assert atten_mask is not None, "rotary parts want a mask"
    parts = (query, key, value, query_rope, key_rope)
    assert all(one.dtype == torch.bfloat16 and one.is_contiguous() for one in parts), "bfloat16 only"
    assert all(one.shape[:2] == query.shape[:2] for one in parts)
    dim, rope = query.shape[2], query_rope.shape[2]
    assert (key.shape[2], key_rope.shape[2]) == (dim, rope)
    assert dim % 8 == rope % 8 == 0
    assert rope <= min(dim, value.shape[2])
    assert dim >= value.shape[2]
    rows = actual_seq_qlen[0]
    assert actual_seq_qlen == actual_seq_kvlen == list(range(rows, len(query) + 1, rows))
    wide = (torch.cat([query, query_rope], dim=-1), torch.cat([key, key_rope], dim=-1), value)
    options = {"atten_mask": atten_mask, "sparse_mode": sparse_mode}
    return [one.unflatten(0, (-1, rows)) for one in wide], options


def _scores(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    layout: str,
    mask: Tensor | None,
    scale: float,
    sparse_mode: int,
) -> Tensor:
    """Return scores ``[batch, heads, rows, keys]`` in fp32, -inf where masked."""
    assert layout == "BSND"
    assert all(one.is_contiguous() and one.dtype == query.dtype for one in (query, key, value))
    assert query.dtype in (torch.bfloat16, torch.float16, torch.float32)
    # The manual also requires one shape for both; MindSpeed's calls and the meta kernel do not.
    assert key.shape[:3] == value.shape[:3]
    assert key.shape[3] >= value.shape[3], "Dk >= Dv"
    assert (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
    assert query.shape[2] == heads <= 256
    assert heads % key.shape[2] == 0
    assert query.shape[3] <= 768
    calls.append((name, query.shape[1], key.shape[1]))
    scores = scale * torch.einsum("bthd,bshd->bhts", query.float(), _repeated(key, heads))
    if mask is None:  # "sparse_mode has no effect then"
        return scores
    # leftUpCausal requires the compressed mask, and computes the lower triangle from the upper left.
    assert sparse_mode == 2
    assert (mask.shape, mask.dtype) == ((2048, 2048), torch.bool)
    assert torch.equal(mask, torch.ones_like(mask).triu(1))
    rows, keys = scores.shape[-2:]
    return scores.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(1), -torch.inf)


def _repeated(states: Tensor, heads: int) -> Tensor:
    return states.float().repeat_interleave(heads // states.shape[2], dim=2)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.unflatten(2, (like.shape[2], -1)).sum(dim=3)
