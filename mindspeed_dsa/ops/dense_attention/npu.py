"""Dense attention on Ascend NPUs: torch_npu's fused attention, which keeps maximum and sum of each row."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.dense_attention.heads import padded
from mindspeed_dsa.ops.npu.device import npu_op, unavailable

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_HEAD = 768
_MOST_HEADS = 256
_LAYOUT = "BSND"
# Row t sees keys 0 .. t; the mask is a corner of this size that the operator repeats.
_LEFT_UP_CAUSAL, _MASK = 2, 2048
# Maximum and sum of a row come in blocks of 32 bytes.
_COPIES = 8


def unsupported(shape: ShapeClass) -> str | None:
    """Why this backend cannot take calls of this shape, or None."""
    reason = unavailable(shape.device, "npu_fusion_attention", "npu_fusion_attention_grad")
    if reason is not None:
        return reason
    if shape.dtype not in _DTYPES:
        return "npu_fusion_attention takes bfloat16, float16 and float32 only"
    if max(shape["dim"], shape["value_dim"]) > _LARGEST_HEAD:
        return f"npu_fusion_attention takes heads of at most {_LARGEST_HEAD} dimensions"
    if shape["heads"] > _MOST_HEADS:
        return f"npu_fusion_attention takes at most {_MOST_HEADS} heads"
    return None


def forward(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """See the protocol."""
    operands = _operands(query, key, value)
    out, maximum, total, *_ = npu_op("npu_fusion_attention")(
        *operands,
        query.shape[2],
        _LAYOUT,
        atten_mask=_mask(query.device) if causal else None,
        scale=softmax_scale,
        sparse_mode=_LEFT_UP_CAUSAL if causal else 0,
    )
    # [batch, heads, query_length, copies]
    lse = maximum[..., 0] + total[..., 0].log()
    return out, lse.transpose(1, 2)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the protocol."""
    operands = _operands(query, key, value)
    # exp(score - maximum) / total with (lse, 1) is the final probability.
    maximum = lse.transpose(1, 2)[..., None].expand(-1, -1, -1, _COPIES).contiguous()
    gradients = npu_op("npu_fusion_attention_grad")(
        *operands,
        grad_out.contiguous(),
        query.shape[2],
        _LAYOUT,
        atten_mask=_mask(query.device) if causal else None,
        softmax_max=maximum,
        softmax_sum=torch.ones_like(maximum),
        attention_in=out.contiguous(),
        scale_value=softmax_scale,
        sparse_mode=_LEFT_UP_CAUSAL if causal else 0,
    )
    grad_query, grad_key, grad_value = gradients[:3]
    return grad_query[..., : query.shape[3]], grad_key[..., : key.shape[3]], grad_value


def _operands(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Contiguous; heads of keys at least as wide as those of values, as the manual wants them."""
    states = padded(max(query.shape[3], value.shape[3]), query, key)
    return [one.contiguous() for one in (*states, value)]


@cache
def _mask(device: torch.device) -> Tensor:
    """``[2048, 2048]`` bool, true above the diagonal, for any length."""
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu_(1)
