"""Backends of dense attention: plain PyTorch, PyTorch's flash attention, and torch_npu's operator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, Call, ShapeClass
from mindspeed_dsa.ops.npu.device import npu_op, unavailable
from mindspeed_dsa.ops.precision import wide

_CPU_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_CPU_OPERATORS = (_CPU_FORWARD, f"{_CPU_FORWARD}_backward")
_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CUDA_OPERATORS = ("_flash_attention_forward", "_flash_attention_backward")
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_CUDA_HEAD = 256
# The CUDA kernels need head sizes that are multiples of this; shorter heads are padded with zeros.
_UNIT = 8
_NPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_NPU_HEAD = 768
_MOST_HEADS = 256
_LAYOUT = "BSND"
_IN_PARTS, _IN_PARTS_GRAD = "npu_fusion_attention_v2", "npu_fusion_attention_grad_v2"
# Row t sees keys 0 .. t. The mask is a square of this size that the operator repeats.
_LEFT_UP_CAUSAL, _MASK = 2, 2048
# The operator repeats maximum and sum of a row 8 times: blocks of 32 bytes = 8 x fp32.
_COPIES = 8


@dataclass(frozen=True)
class DenseCall(Call):
    """Arguments of attention to a subset of the keys; their shapes have been checked.

    Attributes:
        query: ``[batch, query_length, heads, dim]``, any strides with contiguous last axis.
        key: ``[batch, key_length, kv_heads, dim]``, strides as for ``query``; ``kv_heads`` divides ``heads``.
        value: ``[batch, key_length, kv_heads, value_dim]``, strides as for ``query``.
        softmax_scale: factor of the scores.
        causal: whether query ``t`` sees only the keys ``0 .. t``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    softmax_scale: float
    causal: bool


@dataclass(frozen=True)
class PartsCall(Call):
    """Arguments of causal attention with separate rotary parts; their shapes have been checked.

    Attributes:
        query: ``[batch, rows, heads, dim]``, any strides with contiguous last axis, without its rotary part.
        query_rope: ``[batch, rows, heads, rope]``, strides as for ``query``.
        key: ``[batch, rows, heads, dim]``, strides as for ``query``.
        key_rope: ``[batch, rows, 1, rope]``, shared by all heads.
        value: ``[batch, rows, heads, value_dim]``, strides as for ``query``.
        softmax_scale: factor of the scores.
    """

    query: Tensor
    query_rope: Tensor
    key: Tensor
    key_rope: Tensor
    value: Tensor
    softmax_scale: float

    def whole(self) -> DenseCall:
        """Return the call with the rotary parts concatenated to query and key."""
        rope = self.key_rope.expand(-1, -1, self.key.shape[2], -1)  # [batch, rows, heads, rope]
        # [batch, rows, heads, dim + rope] each
        query, key = torch.cat([self.query, self.query_rope], dim=-1), torch.cat([self.key, rope], dim=-1)
        return DenseCall(query, key, self.value, self.softmax_scale, causal=True)


class DenseAttention(Backend):
    """Backend of dense attention. Calls with empty tensors go to the reference only."""

    @abstractmethod
    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:
        """Return ``out`` and ``lse``."""

    @abstractmethod
    def backward(
        self, call: DenseCall, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value due to these keys."""

    def forward_of_parts(self, call: PartsCall) -> tuple[Tensor, Tensor]:
        """Return ``out`` and the statistics for :meth:`backward_of_parts`."""
        return self.forward(call.whole())

    def backward_of_parts(
        self, call: PartsCall, grad_out: Tensor, out: Tensor, statistics: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of query, query_rope, key, key_rope and value."""
        of_query, of_key, of_value = self.backward(call.whole(), grad_out, out, statistics)
        sizes = [call.query.shape[3], call.query_rope.shape[3]]
        # [batch, rows, heads, dim], [batch, rows, heads, rope]
        of_key, of_heads = of_key.split(sizes, dim=-1)
        return *of_query.split(sizes, dim=-1), of_key, _summed(of_heads, 1), of_value


class Reference(DenseAttention):
    """Backend in plain PyTorch, with all scores in memory: ``[batch, heads, query_length, key_length]``."""

    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:
        query, key, value = call.query, call.key, call.value
        heads = query.shape[2]
        scores = _scores(query, _repeated(key, heads), call.softmax_scale, call.causal)
        lse = scores.logsumexp(dim=-1)  # [batch, heads, query_length]
        # Without keys the sums are empty and give zeros.
        probabilities = (scores - lse[..., None]).exp()  # [batch, heads, query_length, key_length]
        # [batch, query_length, heads, value_dim]
        out = torch.einsum("bhts,bshd->bthd", probabilities, _repeated(value, heads).to(scores.dtype))
        return out.to(query.dtype), lse.transpose(1, 2)  # lse: [batch, query_length, heads]

    def backward(
        self, call: DenseCall, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = call.query, call.key, call.value
        heads, kv_heads = query.shape[2], key.shape[2]
        keys, values = _repeated(key, heads), _repeated(value, heads)
        scores = _scores(query, keys, call.softmax_scale, call.causal)
        probabilities = (scores - lse.transpose(1, 2)[..., None].to(scores.dtype)).exp()
        grad, dtype = grad_out.to(scores.dtype), scores.dtype
        # [batch, heads, query_length, 1]
        delta = (grad * out.to(dtype)).sum(dim=-1).transpose(1, 2)[..., None]
        grad_scores = probabilities * (torch.einsum("bthd,bshd->bhts", grad, values.to(dtype)) - delta)
        grad_query = call.softmax_scale * torch.einsum("bhts,bshd->bthd", grad_scores, keys.to(dtype))
        grad_key = call.softmax_scale * torch.einsum("bhts,bthd->bshd", grad_scores, query.to(dtype))
        grad_value = torch.einsum("bhts,bthd->bshd", probabilities, grad)
        return grad_query, _summed(grad_key, kv_heads), _summed(grad_value, kv_heads)


def _scores(query: Tensor, keys: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """Return scores ``[batch, heads, query_length, key_length]``, fp32 or wider; -inf for masked keys."""
    dtype = wide(query.dtype)
    scores = softmax_scale * torch.einsum("bthd,bshd->bhts", query.to(dtype), keys.to(dtype))
    if causal:
        # [query_length, key_length]
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def _has(operators: Iterable[str]) -> bool:
    return all(hasattr(torch.ops.aten, name) for name in operators)


class Cpu(DenseAttention):
    """Backend that calls PyTorch's flash attention for CPUs, which also returns the log-sum-exp."""

    def unsupported(self, shape: ShapeClass) -> str | None:
        if shape.device != "cpu":
            return "it runs on CPU tensors only"
        if not _has(_CPU_OPERATORS):
            return "this torch has no flash attention for CPUs under the name that is called here"
        return (
            None if shape.dtype in _CPU_DTYPES else f"PyTorch's flash attention does not take {shape.dtype}"
        )

    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:
        query, key, value = call.query, call.key, call.value
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_cpu_operands(query, key, value), 0.0, call.causal, scale=call.softmax_scale
        )
        # The kernel's [batch, heads, query_length, ...] has the strides of [batch, query_length, heads, ...].
        return out.transpose(1, 2)[..., : value.shape[3]], lse.transpose(1, 2)

    def backward(
        self, call: DenseCall, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = call.query, call.key, call.value
        operands = _cpu_operands(query, key, value)
        size, kv_heads = operands[0].shape[-1], key.shape[2]
        # [batch, heads, query_length, size]
        grad_out, out = (states.transpose(1, 2) for states in _padded(size, grad_out, out))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, *operands, out, lse.transpose(1, 2), 0.0, call.causal, scale=call.softmax_scale
        )
        # Back to [batch, length, heads, size]
        grad_query, grad_key, grad_value = (gradient.transpose(1, 2) for gradient in gradients)
        return (
            grad_query[..., : query.shape[3]],
            _summed(grad_key[..., : key.shape[3]], kv_heads),
            _summed(grad_value[..., : value.shape[3]], kv_heads),
        )


def _cpu_operands(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return operands ``[batch, heads, length, size]``: heads repeated and sizes padded to be equal."""
    heads, size = query.shape[2], max(query.shape[3], value.shape[3])
    states = _padded(size, query, _repeated(key, heads), _repeated(value, heads))
    return tuple(one.transpose(1, 2) for one in states)  # [batch, heads, length, size]


class Cuda(DenseAttention):
    """Backend that calls PyTorch's flash attention for CUDA; unsupported if PyTorch was built without."""

    def unsupported(self, shape: ShapeClass) -> str | None:
        if shape.device != "cuda":
            return "it runs on CUDA tensors only"
        if not _has(_CUDA_OPERATORS):
            return "this torch has no flash attention under the name that is called here"
        if shape.dtype not in _CUDA_DTYPES:
            return "flash attention takes bfloat16 and float16 only"
        if max(shape["dim"], shape["value_dim"]) > _LARGEST_CUDA_HEAD:
            return f"flash attention takes heads of at most {_LARGEST_CUDA_HEAD} dimensions"
        return None

    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:
        query, key, value = call.query, call.key, call.value
        operands = _padded(_cuda_size(query, value), query, key, value)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *operands,
            None,
            None,
            query.shape[1],
            key.shape[1],
            0.0,
            call.causal,
            False,
            scale=call.softmax_scale,
        )
        return out[..., : value.shape[3]], lse.transpose(1, 2)  # lse: [batch, query_length, heads]

    def backward(
        self, call: DenseCall, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = call.query, call.key, call.value
        grad_out, query_, key_, value_, out = _padded(
            _cuda_size(query, value), grad_out, query, key, value, out
        )
        # Without dropout the random state is not read.
        state = torch.zeros(2, dtype=torch.int64, device=query.device)
        grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
            grad_out.contiguous(),
            query_,
            key_,
            value_,
            out.contiguous(),
            lse.transpose(1, 2).contiguous(),
            None,
            None,
            query.shape[1],
            key.shape[1],
            0.0,
            call.causal,
            state,
            state,
            scale=call.softmax_scale,
        )
        return (
            grad_query[..., : query.shape[3]],
            grad_key[..., : key.shape[3]],
            grad_value[..., : value.shape[3]],
        )


def _cuda_size(query: Tensor, value: Tensor) -> int:
    """Return the kernel's head size: the larger of query's and value's, rounded up to a multiple of 8."""
    size = max(query.shape[3], value.shape[3])
    return size + -size % _UNIT


class Npu(DenseAttention):
    """Backend that calls torch_npu's fused attention, which returns each query's softmax maximum and sum."""

    def unsupported(self, shape: ShapeClass) -> str | None:
        reason = unavailable(shape.device, "npu_fusion_attention", "npu_fusion_attention_grad")
        if reason is not None:
            return reason
        if shape.dtype not in _NPU_DTYPES:
            return "npu_fusion_attention takes bfloat16, float16 and float32 only"
        if max(shape["dim"], shape["value_dim"]) > _LARGEST_NPU_HEAD:
            return f"npu_fusion_attention takes heads of at most {_LARGEST_NPU_HEAD} dimensions"
        if shape["heads"] > _MOST_HEADS:
            return f"npu_fusion_attention takes at most {_MOST_HEADS} heads"
        return None

    def forward(self, call: DenseCall) -> tuple[Tensor, Tensor]:
        query, key, value = call.query, call.key, call.value
        operands = _npu_operands(query, key, value)
        out, maximum, total, *_ = npu_op("npu_fusion_attention")(
            *operands,
            query.shape[2],
            _LAYOUT,
            atten_mask=_mask(query.device) if call.causal else None,
            scale=call.softmax_scale,
            sparse_mode=_LEFT_UP_CAUSAL if call.causal else 0,
        )
        lse = maximum[..., 0] + total[..., 0].log()  # [batch, heads, query_length], of 8 copies
        return out, lse.transpose(1, 2)

    def backward(
        self, call: DenseCall, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = call.query, call.key, call.value
        operands = _npu_operands(query, key, value)
        # The operator takes (maximum, total). With (lse, 1) its exp(score - maximum) / total is the final
        # probability.
        # [batch, heads, query_length, copies]
        maximum = lse.transpose(1, 2)[..., None].expand(-1, -1, -1, _COPIES).contiguous()
        gradients = npu_op("npu_fusion_attention_grad")(
            *operands,
            grad_out.contiguous(),
            query.shape[2],
            _LAYOUT,
            atten_mask=_mask(query.device) if call.causal else None,
            softmax_max=maximum,
            softmax_sum=torch.ones_like(maximum),
            attention_in=out.contiguous(),
            scale_value=call.softmax_scale,
            sparse_mode=_LEFT_UP_CAUSAL if call.causal else 0,
        )
        grad_query, grad_key, grad_value = gradients[:3]
        return grad_query[..., : query.shape[3]], grad_key[..., : key.shape[3]], grad_value

    def declines_parts(
        self, device: str, dtype: torch.dtype, dim: int, rope: int, value_dim: int
    ) -> str | None:
        """Return why the operator cannot take a :class:`PartsCall` of these sizes, or None."""
        reason = unavailable(device, _IN_PARTS, _IN_PARTS_GRAD)
        if reason is not None:
            return reason
        if dtype != torch.bfloat16:
            return f"{_IN_PARTS} takes rotary parts in bfloat16 only"
        if dim % _UNIT or rope % _UNIT or not rope <= value_dim <= dim:
            return (
                f"{_IN_PARTS} takes keys whose two parts have a multiple of {_UNIT} dimensions, and values "
                "that are no narrower than the rotary part and no wider than the other one"
            )
        return None

    def forward_of_parts(self, call: PartsCall) -> tuple[Tensor, Tensor]:
        """Return the output and the softmax statistics in the operator's layout."""
        if self._declines(call):
            return super().forward_of_parts(call)
        operands, options = _npu_parts(call)
        out, maximum, total, *_ = npu_op(_IN_PARTS)(
            *operands, call.query.shape[2], "TND", scale=call.softmax_scale, **options
        )
        # Releases document different orders, by rows or by heads. Backward gets the statistics in the same
        # order.
        statistics = maximum[..., 0] + total[..., 0].log()
        return out.view(*call.value.shape), statistics  # out: [batch, rows, heads, value_dim]

    def backward_of_parts(
        self, call: PartsCall, grad_out: Tensor, out: Tensor, statistics: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of query, query_rope, key, key_rope and value."""
        if self._declines(call):
            return super().backward_of_parts(call, grad_out, out, statistics)
        operands, options = _npu_parts(call)
        maximum = statistics[..., None].expand(-1, -1, _COPIES).contiguous()  # [..., copies]
        gradients = npu_op(_IN_PARTS_GRAD)(
            *operands,
            grad_out.flatten(0, 1).contiguous(),  # [tokens, heads, value_dim]
            call.query.shape[2],
            "TND",
            softmax_max=maximum,
            softmax_sum=torch.ones_like(maximum),
            attention_in=out.flatten(0, 1).contiguous(),  # [tokens, heads, value_dim]
            scale_value=call.softmax_scale,
            **options,
        )
        # [tokens, heads, dim] each; the fourth one is the gradient of a bias.
        query, key, value, query_rope, key_rope = (
            # [batch, rows, heads, ...]
            gradients[index].unflatten(0, call.query.shape[:2])
            for index in (0, 1, 2, 4, 5)
        )
        return query, query_rope, key, _summed(key_rope, 1), value

    def _declines(self, call: PartsCall) -> bool:
        like, sizes = call.query, (one.shape[3] for one in (call.query, call.query_rope, call.value))
        return self.declines_parts(like.device.type, like.dtype, *sizes) is not None


def _npu_parts(call: PartsCall) -> tuple[list[Tensor], dict[str, Any]]:
    """Return query, key and value as ``[tokens, heads, dim]``, and options for forward and backward."""
    batch, rows, heads = call.query.shape[:3]
    operands = (call.query, call.key, call.value, call.query_rope, call.key_rope.expand(-1, -1, heads, -1))
    # [tokens, heads, ...]
    query, key, value, query_rope, key_rope = (one.flatten(0, 1).contiguous() for one in operands)
    ends = [rows * (number + 1) for number in range(batch)]
    options = {
        "query_rope": query_rope,
        "key_rope": key_rope,
        "atten_mask": _mask(query.device),
        "actual_seq_qlen": ends,
        "actual_seq_kvlen": ends,
        "sparse_mode": _LEFT_UP_CAUSAL,
    }
    return [query, key, value], options


def _npu_operands(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return contiguous operands; keys are padded to the width of values, as the operator requires."""
    states = _padded(max(query.shape[3], value.shape[3]), query, key)
    return [one.contiguous() for one in (*states, value)]


@cache
def _mask(device: torch.device) -> Tensor:
    """Return the causal mask, ``[2048, 2048]`` bool, True above the diagonal; the operator repeats it."""
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu_(1)


# Kernels require as many heads for keys as for queries, and one head size for all three.


def _repeated(states: Tensor, heads: int) -> Tensor:
    """Repeat ``[batch, length, kv_heads, dim]`` to ``heads`` heads, with each head's copies adjacent."""
    return states if states.shape[2] == heads else states.repeat_interleave(heads // states.shape[2], dim=2)


def _summed(gradient: Tensor, kv_heads: int) -> Tensor:
    """Invert :func:`_repeated` for gradients: sum over each head's copies, in fp32 or wider."""
    if gradient.shape[2] == kv_heads:
        return gradient
    wide = gradient if gradient.element_size() >= 4 else gradient.float()
    return wide.unflatten(2, (kv_heads, -1)).sum(dim=3)  # [batch, length, kv_heads, dim]


def _padded(size: int, *states: Tensor) -> tuple[Tensor, ...]:
    """Zero-pad the head dimension to ``size``, which changes neither scores nor outputs."""
    # [..., size]
    return tuple(one if one.shape[-1] == size else F.pad(one, (0, size - one.shape[-1])) for one in states)
