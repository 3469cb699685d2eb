"""Attention sinks in every operator that has them, against the softmax with one more column, in fp64."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import dsa
from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss, indexer_kl_loss
from mindspeed_dsa.ops.sparse_flash_attention import cpu_heads, sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.by_head import sparse_attention_by_head
from tests.ops import oracle
from tests.ops.random_inputs import BACKENDS, DTYPES, indexer_inputs, random_indices
from tests.ops.test_dsa_layer import BATCH, HEADS, ROW_KINDS, ROWS, SCALE, TOPK, VALUE, main_inputs
from tests.ops.test_sparse_flash_attention import attention_inputs
from tests.support.counting import noted


def attention(query, key, value, mask, scale, sink):
    """Return output, log-sum-exp and probabilities; key and value are ``[batch, keys, heads, dim]``."""
    scores = (scale * torch.einsum("bthd,bshd->bths", query, key)).masked_fill(~mask[:, :, None], -torch.inf)
    scores = torch.cat([scores, sink[:, None].expand(*scores.shape[:3], 1)], dim=-1)
    probabilities = scores.softmax(-1)[..., :-1]
    return torch.einsum("bths,bshd->bthd", probabilities, value), scores.logsumexp(-1), probabilities


def absorbed(query, key_value, mask, scale, sink, value_dim):
    keys = key_value[:, :, None].expand(-1, -1, query.shape[2], -1)
    return attention(query, keys, keys[..., :value_dim], mask, scale, sink)


def sinks(heads, dtype=torch.float32):
    return torch.linspace(-3, 4, heads, dtype=torch.float64).to(dtype).requires_grad_()


def wide(*tensors):
    return [x.detach().cpu().double().requires_grad_() for x in tensors]


def assert_gradients(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        oracle.assert_close(mine.cpu(), theirs, backward=True)


def check(backend, dtype, shape, device="cpu"):
    keys, heads, dim, value_dim, topk = shape
    query, key_value = attention_inputs(2, 7, keys, heads, dim, dtype)
    indices = random_indices(2, 7, keys, topk, empty_rows=(0, 5))
    sink = sinks(heads, torch.float64 if dtype == torch.float64 else torch.float32)
    main = [x.detach().to(device).requires_grad_() for x in (query, key_value, sink)]
    out, lse, summed = sparse_flash_attention(
        *main[:2],
        indices.to(device),
        dim**-0.5,
        value_dim=value_dim,
        sink=main[2],
        return_attention_sum=True,
        backend=backend,
    )
    leaves = wide(*main)
    mask = oracle.selected_mask(indices, keys)
    expected, expected_lse, probabilities = absorbed(*leaves[:2], mask, dim**-0.5, leaves[2], value_dim)
    oracle.assert_close(out.detach().cpu(), expected)
    assert (out[:, [0, 5]] == 0).all()
    assert oracle.relative_error(lse.cpu(), expected_lse) < 1e-6
    at = probabilities.sum(2).gather(-1, indices.clamp_min(0).long()).masked_fill(indices < 0, 0)
    assert oracle.relative_error(summed.cpu(), at) < 1e-5
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = torch.autograd.grad(out, main, factors.to(device))
    assert [x.dtype for x in found] == [dtype, dtype, sink.dtype]
    assert_gradients(
        found[:2], torch.autograd.grad(expected, leaves[:2], factors.double(), retain_graph=True)
    )
    (of_sink,) = torch.autograd.grad(expected, leaves[2:], factors.double())
    # Rounded outputs and gradients are added over rows, with different signs.
    bound = {torch.float64: 1e-11, torch.float32: 1e-5}.get(dtype, 1e-2)
    assert oracle.relative_error(found[2], of_sink) < bound


SHAPES = [
    # keys, heads, dim, value_dim, topk: few keys are masked on a CPU, many are gathered
    *(pytest.param((83, 4, 40, 32, 40), dtype, id=f"few keys {dtype}") for dtype in (*DTYPES, torch.float64)),
    *(
        pytest.param((400, 3, 40, 32, 9), dtype, id=f"many keys {dtype}")
        for dtype in (*DTYPES, torch.float64)
    ),
    pytest.param((83, 8, 160, 128, 20), torch.bfloat16, id="latent 128"),
    pytest.param((83, 8, 512, 512, 20), torch.bfloat16, id="rope 0"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_equals_a_softmax_with_one_more_column(shape, backend, dtype):
    check(backend, dtype, shape)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_finite_differences(backend):
    query, key_value = attention_inputs(1, 3, 12, 2, 6, torch.float64)
    indices = random_indices(1, 3, 12, 5, empty_rows=(1,))

    def attend(query, key_value, sink):
        return sparse_flash_attention(
            query, key_value, indices, 0.5, value_dim=4, sink=sink, backend=backend
        ).out

    assert torch.autograd.gradcheck(attend, (query, key_value, sinks(2, torch.float64)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", [40, 400])
def test_no_sink_is_one_at_minus_infinity_and_a_high_one_takes_all(backend, keys):
    query, key_value = attention_inputs(1, 9, keys, 3, 24, torch.float32)
    indices = random_indices(1, 9, keys, 20, empty_rows=(2,))

    def attend(sink):
        found = sparse_flash_attention(
            query, key_value, indices, 0.2, value_dim=16, sink=sink, backend=backend
        )
        leaves = (query, key_value) if sink is None else (query, key_value, sink)
        return found.out, found.lse, torch.autograd.grad(found.out.sin().sum(), leaves)

    plain, plain_lse, plain_grads = attend(None)
    out, lse, grads = attend(torch.full((3,), -torch.inf, requires_grad=True))
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(lse, plain_lse)
    torch.testing.assert_close(grads[:2], plain_grads)
    assert (grads[2] == 0).all()
    out, lse, grads = attend(torch.full((3,), 1e4, requires_grad=True))
    for zeros in (out, *grads):
        assert (zeros == 0).all()
    assert (lse == 1e4).all()


@pytest.mark.parametrize("level", [-12.0, 16.0])
@pytest.mark.parametrize("keys", [90, 900])
def test_a_small_share_keeps_its_accuracy(keys, level):
    """The sink's probability, or that of all keys together, is about 1e-6."""
    query, key_value = attention_inputs(1, 30, keys, 2, 16, torch.float32)
    indices = random_indices(1, 30, keys, 60)
    sink = torch.full((2,), level, requires_grad=True)
    leaves = wide(query, key_value, sink)
    expected = absorbed(*leaves[:2], oracle.selected_mask(indices, keys), 0.1, leaves[2], 16)[0]
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(expected, leaves, factors.double())
    for backend in BACKENDS:
        out = sparse_flash_attention(
            query, key_value, indices, 0.1, value_dim=16, sink=sink, backend=backend
        ).out
        for mine, theirs in zip(
            torch.autograd.grad(out, (query, key_value, sink), factors), wanted, strict=True
        ):
            assert oracle.relative_error(mine, theirs) < 2e-5


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("backend", ["cpu", "chunked"])
def test_by_head(backend, dtype, monkeypatch):
    masked = noted(monkeypatch, cpu_heads.forward, cpu_heads.backward)
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 23, 5, 12), (2, 60, 5, 12), (2, 60, 5, 8)
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    sink = sinks(5, torch.float64 if dtype == torch.float64 else torch.float32)
    indices = random_indices(2, 23, 60, 30, empty_rows=(3,))
    out, summed = sparse_attention_by_head(
        *tensors, indices, 0.3, sink=sink, return_attention_sum=True, backend=backend
    )
    leaves = wide(*tensors, sink)
    mask = oracle.selected_mask(indices, 60)
    expected, _, probabilities = attention(*leaves[:3], mask, 0.3, leaves[3])
    oracle.assert_close(out, expected)
    at = probabilities.sum(2).gather(-1, indices.clamp_min(0).long()).masked_fill(indices < 0, 0)
    assert oracle.relative_error(summed, at) < 1e-5
    factors = torch.randn(out.shape, generator=generator).to(dtype)
    found = torch.autograd.grad(out, (*tensors, sink), factors)
    wanted = torch.autograd.grad(expected, leaves, factors.double())
    assert_gradients(found[:3], wanted[:3])
    assert oracle.relative_error(found[3], wanted[3]) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert masked == (["forward", "backward"] if backend == "cpu" else [])


@pytest.mark.parametrize("level", [60.0, 88.0, 89.0, 90.0, 110.0])
def test_by_head_under_sinks_whose_exponential_overflows(level):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 8, 2, 4, generator=generator).mul_(1e-3) for _ in range(3)]
    indices = torch.arange(8, dtype=torch.int32).expand(1, 8, 8).contiguous()
    sink = torch.full((2,), level, requires_grad=True)
    out, _ = sparse_attention_by_head(*tensors, indices, 1.0, sink=sink)
    out.sum().backward()
    # The share of keys is 8 exp(-level), for 8 rows of 4 values below 1.
    bound = 8 * 4 * 8 * torch.tensor(-level, dtype=torch.float64).exp()
    assert sink.grad.double().abs().max() < bound


def test_by_head_falls_back_where_the_gradient_is_not_finite():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 40, 2, 8, generator=generator).requires_grad_() for _ in range(3))
    indices = random_indices(1, 40, 40, 20)
    sink = sinks(2)
    out, _ = sparse_attention_by_head(query, key, value, indices, 0.3, sink=sink)
    grad = torch.ones_like(out)
    grad[0, 0, 0] = torch.inf
    found = torch.autograd.grad(out, (query, key, value, sink), grad, retain_graph=True)
    plain = torch.autograd.grad(out, (query, key, value, sink), torch.ones_like(out))
    assert not torch.isfinite(found[3][0])
    torch.testing.assert_close(found[3][1], plain[3][1])
    torch.testing.assert_close(found[0][:, 1:], plain[0][:, 1:])


@pytest.mark.parametrize("rows", ROW_KINDS)
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("form", ["absorbed", "by head"])
def test_a_layer_with_its_loss(rows, stage, form):
    options, sees = ROW_KINDS[rows]
    main = main_inputs(form == "absorbed")
    index = [x.double().requires_grad_() for x in indexer_inputs(BATCH, ROWS, heads=24)]
    sink = sinks(HEADS, torch.float64)
    result = dsa.deepseek_sparse_attention(
        *main,
        *index,
        topk=TOPK,
        softmax_scale=SCALE,
        value_dim=VALUE if form == "absorbed" else None,
        sink=sink,
        stage=stage,
        with_loss=True,
        **options,
    )
    mask = sees if stage == "warmup" else oracle.selected_mask(result.topk_indices, ROWS)
    query, key, value = main
    if value is None:
        key, value = (x[:, :, None].expand(-1, -1, HEADS, -1) for x in (key, key[..., :VALUE]))
    out, _, probabilities = attention(query, key, value, mask, SCALE, sink)
    counts = mask.any(-1)
    per_row = oracle.divergence(oracle.index_scores(*index), probabilities, mask | ~counts[..., None])
    loss = (per_row * counts).mean()
    oracle.assert_close(result.out, out)
    oracle.assert_close(result.loss, loss)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    leaves = [x for x in (*main, sink, *index) if x is not None]
    assert_gradients(
        torch.autograd.grad((result.out * weight).sum() + result.loss, leaves),
        torch.autograd.grad((out * weight).sum() + loss, leaves),
    )


def losses(backend, device):
    """Return the sparse loss that forms its own target, that from an ``lse``, and the dense loss."""
    index = [x.to(device) for x in indexer_inputs(2, 20, heads=4)]
    query, key = (x.detach().to(device) for x in attention_inputs(2, 20, 20, 3, 24, torch.float32))
    sink = sinks(3).detach().to(device)
    indices = random_indices(2, 20, 20, 8, empty_rows=(2,)).to(device)
    options = {"sink": sink, "backend": backend}
    lse = sparse_flash_attention(query, key, indices, 0.4, value_dim=16, **options).lse
    return (
        indexer_kl_loss(*index, query, key, indices, 0.4, **options),
        indexer_kl_loss(*index, query, key, indices, 0.4, lse=lse, **options),
        dense_indexer_kl_loss(*index, query, key, 0.4, **options),
        dense_indexer_kl_loss(*index, query, key[:, :, None].expand(-1, -1, 3, -1), 0.4, **options),
    )


def check_losses(backend, device="cpu"):
    index = [x.double() for x in indexer_inputs(2, 20, heads=4)]
    query, key, sink = wide(*attention_inputs(2, 20, 20, 3, 24, torch.float32), sinks(3))
    scores = oracle.index_scores(*index)
    indices = random_indices(2, 20, 20, 8, empty_rows=(2,))
    selected, seen = oracle.selected_mask(indices, 20), torch.ones(20, 20, dtype=torch.bool).tril()[None]
    expected = []
    for mask in (selected, seen):
        counts = mask.any(-1)
        probabilities = absorbed(query, key, mask, 0.4, sink, 16)[2]
        per_row = oracle.divergence(scores, probabilities, mask | ~counts[..., None])
        expected.append((per_row * counts).mean())
    found = losses(backend, device)
    for loss, wanted in zip(found, (expected[0], *expected), strict=False):
        assert oracle.relative_error(loss.cpu(), wanted) < 1e-5
    assert oracle.relative_error(found[3].cpu(), expected[1]) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_losses_compare_with_the_shares_of_keys(backend):
    check_losses(backend)


def test_gradients_are_deterministic():
    query, key_value = attention_inputs(1, 64, 640, 8, 40, torch.float32)
    indices, sink = random_indices(1, 64, 640, 48), sinks(8)

    def gradients():
        out = sparse_flash_attention(query, key_value, indices, 0.1, value_dim=32, sink=sink).out
        return torch.autograd.grad(out.sin().sum(), (query, key_value, sink))

    for first, second in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_keys_pass_no_gradient_on(backend):
    query, key_value = attention_inputs(1, 4, 12, 2, 8, torch.float32)
    indices, sink = random_indices(1, 4, 12, 5, empty_rows=(1,)), sinks(2)
    gradients = []
    for value in (1.0, torch.nan):
        out = sparse_flash_attention(
            query, key_value, indices, 0.5, value_dim=8, sink=sink, backend=backend
        ).out
        grad_out = torch.ones_like(out)
        grad_out[:, 1] = value
        gradients.append(torch.autograd.grad(out, sink, grad_out)[0])
    assert gradients[0].any()
    assert torch.equal(*gradients)


def test_a_sink_that_does_not_fit_is_refused():
    query, key_value = attention_inputs(1, 4, 10, 2, 8, torch.float32)
    indices = random_indices(1, 4, 10, 3)
    with pytest.raises(ValueError, match=r"sink must be \[2\], one logit per head, got \[3\]"):
        sparse_flash_attention(query, key_value, indices, 1.0, value_dim=4, sink=torch.zeros(3))
    with pytest.raises(ValueError, match="sink must be floating point on cpu, got"):
        sparse_flash_attention(query, key_value, indices, 1.0, value_dim=4, sink=torch.zeros(2).long())


def test_equals_the_attention_of_hy_v4():
    modeling = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 12, 8, generator=generator).requires_grad_() for _ in range(3))
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 1, torch.nn.Parameter(torch.tensor([-1.0, 0.5, 2.0]))
    mask = torch.zeros(12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    theirs, _ = modeling.eager_attention_forward(module, query, key, value, mask, 0.3)
    ours = dsa.deepseek_sparse_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        *(None,) * 3,
        topk=12,
        softmax_scale=0.3,
        sink=module.sinks,
    ).out
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    leaves = (query, key, value, module.sinks)
    for mine, other in zip(
        torch.autograd.grad(ours.sin().sum(), leaves),
        torch.autograd.grad(theirs.sin().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
