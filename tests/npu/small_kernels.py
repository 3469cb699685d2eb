"""CPU kernels of RMSNorm, SwiGLU and rotary embedding, written from torch_npu's manuals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.npu.kernel_parts import Call, calls

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    _check("npu_rms_norm", self)
    assert gamma.dtype in (self.dtype, torch.float32)
    assert 2 <= self.dim() <= 8
    wide = self.float()
    rstd = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    calls.append(Call("npu_rms_norm", "", tuple(self.shape[:-1])))
    return (wide * rstd * gamma.float()).to(self.dtype), rstd


def npu_rms_norm_backward(dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    _check("npu_rms_norm_backward", dy, self)
    assert gamma.dtype in (self.dtype, torch.float32)
    assert rstd.dtype == torch.float32
    normal, weighted = self.float() * rstd, dy.float() * gamma.float()
    grad = rstd * (weighted - normal * (weighted * normal).mean(-1, keepdim=True))
    calls.append(Call("npu_rms_norm_backward", "", tuple(self.shape[:-1])))
    return grad.to(self.dtype), (dy.float() * normal).flatten(0, -2).sum(0)


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    _check("npu_swiglu", self)
    first, second = self.float().chunk(2, dim)
    calls.append(Call("npu_swiglu", "", tuple(self.shape[:-1])))
    return (F.silu(first) * second).to(self.dtype)


def npu_swiglu_backward(grad_output: Tensor, self: Tensor, dim: int = -1) -> Tensor:
    _check("npu_swiglu_backward", grad_output, self)
    first, second = self.float().chunk(2, dim)
    gate, wide = first.sigmoid(), grad_output.float()
    grad_first = wide * second * gate * (1 + first * (1 - gate))
    grad = torch.cat((grad_first, wide * first * gate), dim)
    calls.append(Call("npu_swiglu_backward", "", tuple(self.shape[:-1])))
    return grad.to(self.dtype)


def npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    name = "npu_rotary_mul"
    _check(name, self, r1, r2)
    assert rotate is None
    assert self.dim() == r1.dim() == r2.dim() == 4, name
    rows, batch, heads, dim = self.shape
    assert dim < 896, name
    assert dim % 2 == 0, name
    # Rows first: S11D, and in halves SB1D too.
    assert r1.shape == r2.shape, name
    assert r1.shape == (rows, 1, 1, dim) or (rotary_mode == "half" and r1.shape == (rows, batch, 1, dim)), (
        name
    )
    assert max(r1.abs().max(), r2.abs().max()) <= 1, f"{name}: sines and cosines lie in [-1, 1]"
    if rotary_mode == "half":
        assert max(batch, heads) < 1000, name
        first, second = self.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        assert rotary_mode == "interleave", name
        assert batch * heads < 1000, name
        turned = torch.stack((-self[..., 1::2], self[..., ::2]), -1).flatten(-2)
    calls.append(Call(name, rotary_mode, (rows,)))
    return (r1.float() * self.float() + r2.float() * turned.float()).to(self.dtype)


def _check(name: str, *tensors: Tensor) -> None:
    assert len({tensor.dtype for tensor in tensors}) == 1, f"{name}: {[tensor.dtype for tensor in tensors]}"
    assert tensors[0].dtype in _DTYPES, f"{name}: {tensors[0].dtype}"


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: list[Tensor],
) -> tuple[Tensor, ...]:
    """Compute the form with ``out``; powers of beta are the previous step's."""
    var, m, v = out
    assert not amsgrad
    assert not maximize
    m.copy_(beta1 * m + (1 - beta1) * grad)
    v.copy_(beta2 * v + (1 - beta2) * grad * grad)
    m_hat, v_hat = m / (1 - beta1_power * beta1), v / (1 - beta2_power * beta2)
    var.copy_(var - lr / (v_hat.sqrt() + epsilon) * m_hat - lr * weight_decay * var)
    return var, m, v
