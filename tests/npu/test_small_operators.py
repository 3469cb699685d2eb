"""The NPU backends of RMSNorm, SwiGLU and rotary embedding, through torch_npu's own operators."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mindspeed_dsa.ops.backend import BackendUnavailable
from mindspeed_dsa.ops.npu import device as npu_device
from mindspeed_dsa.ops.rms_norm import rms_norm
from mindspeed_dsa.ops.rotary import rotation
from tests.ops.small_cases import cases

RTOL = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
CALLED = {
    "norm": ["npu_rms_norm", "npu_rms_norm_backward"],
    "swiglu": ["npu_swiglu", "npu_swiglu_backward"],
    "swiglu with a bias": ["npu_swiglu", "npu_swiglu_backward"],
    "swiglu by probabilities": ["npu_swiglu", "npu_swiglu", "npu_swiglu_backward"],
    "rotary": ["npu_rotary_mul"] * 2,
    "rotary, neighbours": ["npu_rotary_mul"] * 2,
    "rotary, latent attention": ["npu_rotary_mul"] * 2,
}


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("name", CALLED)
def test_as_the_reference(npu_kernels, name, dtype):
    case = cases()[name]
    reference = case.run(partial(case.ours, backend="reference"), dtype)
    assert npu_kernels == []
    ours = case.run(partial(case.ours, backend="npu"), dtype)
    for one, other in zip(ours.tensors, reference.tensors, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=RTOL[dtype] * float(other.abs().max()))
    assert ours.kept <= reference.kept
    # Run forward once more, before anything is counted.
    forward = CALLED[name][:1]
    assert [call.name for call in npu_kernels] == forward + CALLED[name]
    modes = {call.layout for call in npu_kernels if call.name == "npu_rotary_mul"}
    assert modes <= {"interleave" if name.endswith("neighbours") else "half"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_whose_weight_stays_in_fp32(npu_kernels, dtype):
    """MindSpeed-LLM's V3.2 scripts keep it in fp32; its gradient is in fp32, too."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 64, generator=generator).to(dtype).requires_grad_()
    weight = (1 + torch.randn(64, generator=generator) / 8).requires_grad_()
    grad = torch.randn(3, 5, 64, generator=generator).to(dtype)
    results = []
    for backend in ("reference", "npu"):
        out = rms_norm(hidden, weight, 1e-6, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out, (hidden, weight), grad)])
    assert [call.name for call in npu_kernels] == ["npu_rms_norm", "npu_rms_norm_backward"]
    for other, one, rtol in zip(*results, (2e-2, 2e-2, 1e-5), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=rtol * float(other.abs().max()))
    assert results[1][2].dtype == torch.float32


@pytest.mark.parametrize(
    ("device", "taken"),
    [("Ascend910B3", True), ("Ascend910_9391", True), ("Ascend950PR_9579", False), ("Ascend310P3", False)],
)
def test_products_whose_norm_takes_no_wider_weight(npu_kernels, monkeypatch, device, taken):
    """An unknown device takes none either; all devices take a weight of the input's dtype."""
    monkeypatch.setattr("torch.npu.get_device_name", lambda number=None: device)
    monkeypatch.setattr("mindspeed_dsa.ops.backend.PREFERENCE", {"cpu": ("npu", "reference")})
    npu_device.product.cache_clear()
    hidden = torch.randn(2, 8).bfloat16()
    out = rms_norm(hidden, torch.ones(8), 1e-6)
    assert bool(npu_kernels) == taken
    torch.testing.assert_close(out, rms_norm(hidden, torch.ones(8), 1e-6, backend="reference"))
    if not taken:
        with pytest.raises(
            BackendUnavailable,
            match=r"takes a weight in fp32 beside torch.bfloat16 on Atlas A2 and Atlas A3 only; this is",
        ):
            rms_norm(hidden, torch.ones(8), 1e-6, backend="npu")
    npu_kernels.clear()
    rms_norm(hidden, torch.ones(8).bfloat16(), 1e-6, backend="npu")
    assert [call.name for call in npu_kernels] == ["npu_rms_norm"]


def test_what_the_manuals_exclude_is_declined_by_name(npu_kernels):
    with pytest.raises(BackendUnavailable, match="takes a weight of its input's dtype or in fp32"):
        rms_norm(torch.zeros(2, 8), torch.ones(8, dtype=torch.bfloat16), 1e-6, backend="npu")
    angles, like = torch.zeros(4, 1, 1, 8), torch.zeros(4, 2, 3, 8)
    for call, problem in (
        ((angles, 1.37, "halves", like), "sines and cosines of up to 1"),
        ((angles.expand(4, 2, 1, 8), 1.0, "pairs", like), "takes angles by row"),
        ((angles, 1.0, "halves", torch.zeros(4, 1, 1000, 8)), "fewer than 1000 sequences and heads"),
        ((angles, 1.0, "halves", like.double()), "takes fp32, bf16 and fp16"),
    ):
        with pytest.raises(BackendUnavailable, match=problem):
            rotation(*call, backend="npu")
    assert npu_kernels == []
