"""Dense attention in parts, for every backend available here, against softmax over all keys by autograd."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.backend import ShapeClass, calls
from mindspeed_dsa.ops.dense_attention import (
    attention_of_parts,
    dense_attention,
    dense_attention_backward,
)
from mindspeed_dsa.ops.dense_attention.backends import Cuda, DenseCall
from tests.ops.dense_cases import SHAPES, TOLERANCES, assert_close, check, check_parts, problem

BACKENDS = ("reference", "cpu")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_make_the_whole(backend, dtype, shape):
    before = calls()["dense_attention", backend]
    check(backend, dtype, shape)
    assert calls()["dense_attention", backend] == before + 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rotary_parts_that_are_apart(backend, dtype):
    check_parts(backend, dtype)


def test_rotary_parts_that_do_not_fit_are_refused():
    query, rope = torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 8)
    for operands, message in (
        ((query, rope[:, :4], query, rope[:, :, :1], query), "query_rope must be"),
        ((query, rope, query, rope, query), "key_rope must be"),
        ((query, rope, query[:, :, :1], rope[:, :, :1], query), "key must be"),
        ((query, rope.double(), query, rope[:, :, :1], query), "must have the dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_of_parts(*operands, 0.3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash_attention_in_parts_makes_the_whole(dtype, shape):
    check("cuda", dtype, shape, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_reach_in(backend):
    (query, key, value), _ = problem(torch.float32, SHAPES[0])
    plain = dense_attention(query, key, value, 0.3, causal=True, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = dense_attention(query, key, value, 0.3, causal=True, backend=backend)
    for found, right in zip(cast, plain, strict=True):
        assert_close(found, right, TOLERANCES[torch.float32], "autocast")


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_no_keys_are_zero_and_minus_infinity(backend):
    (query, key, value), grad = problem(torch.float32, SHAPES[0])
    out, lse = dense_attention(query, key[:, :0], value[:, :0], 0.3, causal=False, backend=backend)
    assert out.eq(0).all()
    assert lse.isneginf().all()
    zero = torch.zeros_like(lse)
    gradients = dense_attention_backward(
        grad, query, key[:, :0], value[:, :0], out, zero, 0.3, causal=False, backend=backend
    )
    assert gradients[0].eq(0).all()
    assert [one.shape[1] for one in gradients[1:]] == [0, 0]


def test_the_cuda_backend_calls_what_torch_has():
    # Checks arguments and shapes only: PyTorch's meta functions replace the kernels.
    query, key, value, grad = (
        torch.empty(2, rows, heads, dim, dtype=torch.bfloat16, device="meta")
        for rows, heads, dim in ((16, 8, 20), (24, 2, 20), (24, 2, 12), (16, 8, 12))
    )
    call = DenseCall(query, key, value, 0.3, False)
    out, lse = Cuda().forward(call)
    assert (tuple(out.shape), tuple(lse.shape), lse.dtype) == ((2, 16, 8, 12), (2, 16, 8), torch.float32)
    found = Cuda().backward(call, grad, out, lse)
    assert [tuple(one.shape) for one in found] == [tuple(one.shape) for one in (query, key, value)]


def test_the_cuda_backend_names_its_limits():
    def refused(dtype=torch.bfloat16, device="cuda", value_dim=128):
        sizes = (("heads", 8), ("kv_heads", 2), ("dim", 64), ("value_dim", value_dim))
        return Cuda().unsupported(ShapeClass(device, dtype, sizes))

    assert refused() is None
    assert refused(device="cpu") == "it runs on CUDA tensors only"
    assert "bfloat16 and float16 only" in refused(torch.float32)
    assert "at most 256" in refused(value_dim=264)


def test_bad_input_is_named():
    (query, key, value), grad = problem(torch.float32, SHAPES[0])
    for message, call in (
        ("key must be", lambda: dense_attention(query, key[..., :-1], value, 1.0, causal=False)),
        ("value must be", lambda: dense_attention(query, key, value[:, 1:], 1.0, causal=False)),
        ("as many rows as|as many keys", lambda: dense_attention(query[:, 1:], key, value, 1.0, causal=True)),
        ("must have the dtype", lambda: dense_attention(query, key.double(), value, 1.0, causal=False)),
        (
            "4 heads cannot share 3 key-value heads",
            lambda: dense_attention(
                query,
                key[:, :, :1].expand(-1, -1, 3, -1),
                value[:, :, :1].expand(-1, -1, 3, -1),
                1.0,
                causal=True,
            ),
        ),
        (
            "lse must be",
            lambda: dense_attention_backward(
                grad, query, key, value, grad, grad[..., 0, 0], 1.0, causal=True
            ),
        ),
    ):
        with pytest.raises(ValueError, match=f"dense_attention: .*({message})"):
            call()
