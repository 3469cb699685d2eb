"""Dense attention in parts through torch_npu's own operators."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.backend import ShapeClass
from mindspeed_dsa.ops.dense_attention.backends import DenseCall, Npu, Reference
from mindspeed_dsa.ops.npu import device as npu_device
from tests.npu import dense_kernels
from tests.npu.counting import counted
from tests.ops import oracle
from tests.ops.dense_cases import SHAPES, check, check_parts

_meta_registrations = pytest.importorskip("torch_npu.op_plugin.meta._meta_registrations")


@pytest.fixture(autouse=True)
def operators(npu_kernels, monkeypatch):
    # The shape function queries the device's kind once, for a warning about torch.compile.
    monkeypatch.setattr(_meta_registrations, "_npu_fusion_attention_warning_printed", True, raising=False)
    dense_kernels.calls.clear()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_parts_make_the_whole(dtype, shape):
    check("npu", dtype, shape)
    half, rows = shape.rows // 2, shape.rows - shape.rows // 2
    sizes = [(half, half), (rows, half), (rows, rows)]
    assert dense_kernels.calls == [
        (name, *size) for name in ("npu_fusion_attention", "npu_fusion_attention_grad") for size in sizes
    ]


@pytest.mark.parametrize("batch", [1, 2])
def test_rotary_parts_that_are_apart(batch):
    """Parts stay separate, except in dtypes that the operator does not take."""
    with counted(smallest_copy=40 * 6 * 8) as counts:
        check_parts("npu", torch.bfloat16, batch)
    names = ["npu_fusion_attention_v2", "npu_fusion_attention_grad_v2"]
    assert dense_kernels.calls == [(name, 40, 40) for name in names]
    ours = [event for event in counts.copies if "dense_attention/backends.py" in event.where]
    assert ours
    assert not [event for event in ours if event.shape[-1] == 24], counts.told("copies")
    dense_kernels.calls.clear()
    check_parts("npu", torch.float32)
    assert [name for name, *_ in dense_kernels.calls] == ["npu_fusion_attention", "npu_fusion_attention_grad"]


def test_limits_of_parts_have_names(monkeypatch):
    def refused(dtype=torch.bfloat16, dim=128, rope=64, value_dim=128):
        return Npu().declines_parts("cpu", dtype, dim, rope, value_dim)

    assert refused() is None
    assert "in bfloat16 only" in refused(torch.float16)
    for sizes in ({"dim": 132}, {"rope": 60}, {"rope": 136}, {"value_dim": 192}, {"value_dim": 32}):
        assert "multiple of 8 dimensions" in refused(**sizes)
    monkeypatch.setattr(npu_device, "takes_device", lambda device: False)
    assert refused() == "it runs on NPU tensors only"


def test_limits_have_names(monkeypatch):
    def refused(dtype=torch.bfloat16, heads=8, dim=192):
        sizes = (("heads", heads), ("kv_heads", 8), ("dim", dim), ("value_dim", 128))
        return Npu().unsupported(ShapeClass("cpu", dtype, sizes))

    assert refused() is None
    assert "bfloat16, float16 and float32 only" in refused(torch.float64)
    assert "at most 256 heads" in refused(heads=264)
    assert "at most 768 dimensions" in refused(dim=769)
    monkeypatch.setattr(npu_device, "takes_device", lambda device: False)
    assert refused() == "it runs on NPU tensors only"


@pytest.mark.parametrize(("dim", "value_dim", "copies"), [(192, 128, 0), (128, 192, 4)])
def test_values_are_not_filled_up_to_the_width_of_keys(dim, value_dim, copies):
    """Keys and queries are padded, forward and backward, in the rare case that values are wider."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 12, 4, dim), (2, 12, 2, dim), (2, 12, 2, value_dim))
    query, key, value = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    with counted() as counts:
        call = DenseCall(query, key, value, 0.1, True)
        out, lse = Npu().forward(call)
        gradients = Npu().backward(call, torch.ones_like(out), out, lse)
    padded = [event for event in counts.copies if event.what == "constant_pad_nd"]
    assert len(padded) == copies, counts.told("copies")
    assert out.shape == (2, 12, 4, value_dim)
    wide = [x.float() for x in (query, key, value)]
    call = DenseCall(*wide, 0.1, True)
    expected, of_expected = Reference().forward(call)
    assert oracle.relative_error(out, expected) < 1e-2
    wanted = Reference().backward(call, torch.ones_like(expected), expected, of_expected)
    for found, other in zip(gradients, wanted, strict=True):
        assert oracle.relative_error(found, other) < 2e-2
