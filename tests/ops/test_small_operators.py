"""RMSNorm, SwiGLU and rotary embedding against Megatron's code, forward and backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mindspeed_dsa.ops import liger
from mindspeed_dsa.ops.backend import BackendUnavailable, choose
from mindspeed_dsa.ops.rms_norm import rms_norm
from mindspeed_dsa.ops.rotary import rotation
from mindspeed_dsa.ops.swiglu import swiglu
from tests.ops.small_cases import cases

NAMES = tuple(cases())
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def assert_close(ours, theirs, dtype):
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=RTOL[dtype] * scale)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_as_megatron_with_fewer_bytes_and_operations(name, dtype):
    case = cases()[name]
    ours, theirs = case.run(case.ours, dtype), case.run(case.theirs, dtype)
    assert_close(ours.tensors, theirs.tensors, dtype)
    output, gradients = case.same_bits
    assert not output or ours.tensors[0].equal(theirs.tensors[0])
    assert not gradients or all(a.equal(b) for a, b in zip(ours.tensors, theirs.tensors, strict=True))
    assert ours.kept <= theirs.kept
    assert ours.dispatched <= (0.72 if "probabilities" in name else 0.67) * theirs.dispatched
    if name == "norm":  # besides the input, one number per row is saved
        assert ours.kept <= theirs.kept * (0.6 if dtype == torch.float32 else 0.35)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_same_function(name):
    case = cases()[name]
    for dtype in RTOL:
        reference = case.run(partial(case.ours, backend="reference"), dtype)
        assert_close(case.run(case.ours, dtype).tensors, reference.tensors, dtype)


@pytest.mark.parametrize("name", ["norm", "swiglu", "swiglu by probabilities"])
def test_calls_without_rows(name):
    case = cases()[name]
    case.inputs = [(0, *shape[1:]) if len(shape) > 1 else shape for shape in case.inputs]
    found = case.run(case.ours, torch.float32)
    assert [tensor.shape for tensor in found.tensors[1:]] == [torch.Size(shape) for shape in case.inputs]
    assert not any(tensor.any() for tensor in found.tensors)


def test_rows_that_are_not_finite_stay_their_own():
    hidden = torch.randn(4, 8)
    hidden[1, 2], hidden[2, 0] = torch.inf, torch.nan
    ours, theirs = rms_norm(hidden, torch.ones(8), 1e-6), torch.nn.functional.rms_norm(hidden, (8,), eps=1e-6)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours[[0, 3]].isfinite().all()


def test_what_does_not_fit_is_named():
    hidden = torch.zeros(2, 6)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have the last size of hidden, got \[4\]"):
        rms_norm(hidden, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="swiglu: gate_up must have an even last size"):
        swiglu(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"swiglu: scale must be \[2, 1\], got \[2\]"):
        swiglu(hidden, scale=torch.ones(2))
    with pytest.raises(
        ValueError, match="rotary: an even number of dimensions is rotated, of 4 at most; got 6"
    ):
        rotation(torch.zeros(2, 1, 1, 6), 1.0, "halves", torch.zeros(2, 1, 1, 4))
    with pytest.raises(BackendUnavailable, match="Liger-Kernel runs on GPUs"):
        rms_norm(hidden, torch.ones(6), 1e-6, backend="cuda")


@pytest.mark.parametrize("name", [name for name in NAMES if "swiglu" in name])
def test_liger_kernels(monkeypatch, name):
    # In the interpreter, neither Liger's norm nor its bf16 results are right.
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # kernel definitions read it
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(liger, "takes_device", lambda device: device == "cpu")
    choose.cache_clear()
    case = cases()[name]
    try:
        ours = case.run(partial(case.ours, backend="cuda"), torch.float32)
        theirs = case.run(case.theirs, torch.float32)
        assert_close(ours.tensors, theirs.tensors, torch.float32)
        assert ours.kept <= theirs.kept
    finally:
        choose.cache_clear()
