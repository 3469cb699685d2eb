"""The NPU backend of sparse flash attention against the reference, through torch_npu's own operators."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.npu.counting import counted
from tests.npu.kernel_parts import Call
from tests.npu.selected_indices import causal_indices, packed_indices
from tests.ops import oracle

SCALE = 192**-0.5


def attention_inputs(batch, rows, keys, heads, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, rows, heads, 576, generator=generator).to(dtype)
    key_value = torch.randn(batch, keys, 576, generator=generator).to(dtype)
    return query.requires_grad_(), key_value.requires_grad_()


def check(calls, query, key_value, indices, layout, queries, sink=None):
    leaves = [x for x in (query, key_value, sink) if x is not None]
    wide = [x.detach().float().requires_grad_() for x in leaves]
    options = {"value_dim": 512, "return_attention_sum": True}
    # The CPU backend forms no [rows, topk, dim], and is tested against the oracle elsewhere.
    expected = sparse_flash_attention(
        *wide[:2], indices, SCALE, sink=wide[2] if wide[2:] else None, backend="cpu", **options
    )
    result = sparse_flash_attention(query, key_value, indices, SCALE, sink=sink, backend="npu", **options)
    assert result.out.dtype == query.dtype
    assert result.lse.dtype == torch.float32
    assert oracle.relative_error(result.out.detach(), expected.out.detach()) < 8e-3
    assert oracle.relative_error(result.lse, expected.lse) < 1e-6
    assert oracle.relative_error(result.attention_sum, expected.attention_sum) < 1e-5

    factors = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(1)).to(query.dtype)
    grads = torch.autograd.grad(result.out, leaves, factors)
    expected_grads = torch.autograd.grad(expected.out, wide, factors.float())
    for grad, expected_grad, leaf in zip(grads, expected_grads, leaves, strict=True):
        assert grad.dtype == leaf.dtype
        assert oracle.relative_error(grad, expected_grad) < 1e-2
    assert calls == [
        Call("npu_sparse_flash_attention", layout, queries),
        Call("npu_sparse_flash_attention_grad", layout, queries),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 16, 64])
def test_causal_rows(npu_kernels, dtype, heads):
    """topk equals the number of keys, which is padded to the operators' next width."""
    query, key_value = attention_inputs(2, 40, 40, heads, dtype)
    check(npu_kernels, query, key_value, causal_indices(2, 40, 40, 40), "BSND", (40, 40))


@pytest.mark.parametrize("lengths", [None, (20, 1, 24)], ids=["BSND", "TND"])
def test_sinks_are_put_into_the_operators_statistics(npu_kernels, lengths):
    query, key_value = attention_inputs(1, 45, 45, 8)
    indices = causal_indices(1, 45, 45, 45) if lengths is None else packed_indices(lengths, 45)[None]
    sink = torch.linspace(-2, 3, 8).requires_grad_()
    check(npu_kernels, query, key_value, indices, "TND" if lengths else "BSND", lengths or (45,), sink)


def test_more_keys_than_rows(npu_kernels):
    query, key_value = attention_inputs(2, 30, 50, 8)
    check(npu_kernels, query, key_value, causal_indices(2, 30, 50, 50), "BSND", (30, 30))


def test_packed_sequences(npu_kernels):
    query, key_value = attention_inputs(2, 45, 45, 8)
    indices = torch.stack([packed_indices((20, 1, 24), 45), packed_indices((7, 38), 45)])
    check(npu_kernels, query, key_value, indices, "TND", (20, 1, 24, 7, 38))


@pytest.mark.parametrize("lengths", [None, (1040, 20)], ids=["BSND", "TND"])
def test_rows_that_see_more_than_topk(npu_kernels, lengths):
    query, key_value = attention_inputs(1, 1060, 1060, 2)
    indices = causal_indices(1, 1060, 1060, 1024) if lengths is None else packed_indices(lengths, 1024)[None]
    layout = "BSND" if lengths is None else "TND"
    check(npu_kernels, query, key_value, indices, layout, lengths or (1060,))


def test_gradient_of_scores_in_the_backward(npu_kernels):
    """The hook gets the forward's sum of probabilities."""
    query, key_value = attention_inputs(1, 40, 40, 4)
    indices = causal_indices(1, 40, 40, 40)
    scores = torch.zeros(1, 40, 40, requires_grad=True)
    handed = []
    result = sparse_flash_attention(
        query,
        key_value,
        indices,
        SCALE,
        value_dim=512,
        return_attention_sum=True,
        topk_scores=scores,
        score_gradient=lambda summed: handed.append(summed) or 2 * summed,
        backend="npu",
    )
    (grad,) = torch.autograd.grad(result.out.sum(), scores)
    assert torch.equal(handed[0], result.attention_sum)
    assert torch.equal(grad, 2 * result.attention_sum)


@pytest.mark.parametrize("backend", ["npu", "cpu"])
def test_a_query_in_two_parts_is_the_same_query(npu_kernels, backend):
    """npu copies no part of query or key, forward or backward; other backends join the parts."""
    query, key_value = attention_inputs(1, 40, 40, 4)
    latent, rope = (x.detach().contiguous().requires_grad_() for x in query.split([512, 64], dim=-1))
    indices = causal_indices(1, 40, 40, 40)
    factors = torch.randn(1, 40, 4, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    options = {"value_dim": 512, "return_attention_sum": True, "backend": backend}
    whole = sparse_flash_attention(query, key_value, indices, SCALE, **options)
    grad_query, grad_key = torch.autograd.grad(whole.out, (query, key_value), factors)
    options["return_attention_sum"] = False
    with counted(smallest_copy=latent.numel() // 8) as counts:
        apart = sparse_flash_attention(latent, key_value, indices, SCALE, query_rope=rope, **options)
        grads = torch.autograd.grad(apart.out, (latent, rope, key_value), factors)
        parts = [x.detach().contiguous().requires_grad_() for x in key_value.split([512, 64], dim=-1)]
        options |= {"query_rope": rope, "key_rope": parts[1]}
        keys_apart = sparse_flash_attention(latent, parts[0], indices, SCALE, **options)
        grads_of_parts = torch.autograd.grad(keys_apart.out, (latent, rope, *parts), factors)
    assert torch.equal(apart.out, whole.out)
    assert torch.equal(apart.lse, whole.lse)
    assert torch.equal(torch.cat(grads[:2], dim=-1), grad_query)
    assert torch.equal(grads[2], grad_key)
    assert torch.equal(keys_apart.out, whole.out)
    assert torch.equal(torch.cat(grads_of_parts[:2], dim=-1), grad_query)
    assert torch.equal(torch.cat(grads_of_parts[2:], dim=-1), grad_key)
    copied = [event for event in counts.copies if event.shape[-2:] in ((4, 64), (4, 512), (4, 576))]
    assert bool(copied) == (backend == "cpu"), counts.told("copies")


@pytest.mark.parametrize("backend", ["npu", "cpu"])
def test_receivers_take_the_gradients_of_both_parts_of_a_key(npu_kernels, backend):
    """If a backend joins the parts, the gradient goes to the parts instead."""
    query, key_value = attention_inputs(1, 40, 40, 4)
    latent, rope = (x.detach() for x in query.split([512, 64], dim=-1))
    parts = [x.detach().contiguous().requires_grad_() for x in key_value.split([512, 64], dim=-1)]
    receivers = [part.detach().float().requires_grad_() for part in parts]
    result = sparse_flash_attention(
        latent,
        parts[0],
        causal_indices(1, 40, 40, 40),
        SCALE,
        value_dim=512,
        query_rope=rope,
        key_rope=parts[1],
        key_receiver=receivers[0],
        key_rope_receiver=receivers[1],
        backend=backend,
    )
    found = torch.autograd.grad(result.out.float().square().sum(), (*parts, *receivers), allow_unused=True)
    assert [gradient is not None for gradient in found] == [backend == "cpu"] * 2 + [backend == "npu"] * 2


def test_parts_that_do_not_fit_are_refused(npu_kernels):
    query, key_value = attention_inputs(1, 40, 40, 4)
    latent, rope = (x.detach() for x in query.split([512, 64], dim=-1))
    key, key_rope = (x.detach() for x in key_value.split([512, 64], dim=-1))
    indices = causal_indices(1, 40, 40, 40)
    for options, message in (
        ({"key_rope": key_rope}, "key_rope without query_rope"),
        ({"key_rope": key_rope[:, :39], "query_rope": rope}, "key_rope must be"),
        ({"key_rope": key_rope, "query_rope": rope, "value_dim": 500}, "value_dim must be 512"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse_flash_attention(latent, key, indices, SCALE, **{"value_dim": 512, **options})


def test_padding_is_not_read(npu_kernels):
    """Rows of a packed batch see only their own sequence: garbage in another sequence does not spread."""
    query, key_value = attention_inputs(1, 45, 45, 2)
    with torch.no_grad():
        key_value[:, 20:] = torch.nan
    out = sparse_flash_attention(
        query, key_value, packed_indices((20, 25), 45)[None], SCALE, value_dim=512, backend="npu"
    ).out
    assert torch.isfinite(out[:, :20]).all()
