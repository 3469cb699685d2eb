"""Attention kernels for Hopper: their selection, and their results on a GPU or in ``gluon_on_cpu``.

On a GPU, the tests of the Triton backend also cover them at the sizes they support. The tests here depend on
their dataflow: partial tiles, and warp groups that might race.
"""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from mindspeed_dsa.ops.triton.launch import rehearsal
from tests.ops import oracle
from tests.ops.random_inputs import drifting_indices, random_indices
from tests.ops.test_sparse_flash_attention import attention_inputs, expected_of
from tests.ops.triton_backend import DEVICE, attention, common, hopper

ON_CPU = DEVICE == "cpu"


def long_on_cpu(*values):
    """Return parameters of a case that the quick suite leaves out where an interpreter runs the kernels."""
    return pytest.param(*values, marks=pytest.mark.full if ON_CPU else ())


SIZES = [
    (16, torch.bfloat16),
    (33, torch.bfloat16),
    *(long_on_cpu(heads, torch.bfloat16) for heads in (1, 64, 128, 200)),
    *(long_on_cpu(heads, torch.float16) for heads in (16, 64)),
]


def rows_of(*shape, gap=16, dtype=torch.bfloat16, offset=0):
    """Return rows of ``shape[-1]`` numbers with gaps between them."""
    width = shape[-1]
    return torch.empty(*shape[:-1], width + gap, dtype=dtype)[..., offset : offset + width]


# Query and key-value rows as MLA's absorbed attention has them: 512 latent + 64 rotary columns.
TAKEN = [rows_of(1, 2, 8, 576), rows_of(1, 9, 576)]


@pytest.mark.parametrize(
    ("tensors", "value_dim", "taken"),
    [
        pytest.param(TAKEN, 512, True, id="bf16"),
        pytest.param([x.half() for x in TAKEN], 512, True, id="fp16"),
        pytest.param([x.float() for x in TAKEN], 512, False, id="fp32"),
        pytest.param(TAKEN, 576, False, id="no-rope"),
        pytest.param([x[..., :192] for x in TAKEN], 128, False, id="small-keys"),
        pytest.param([TAKEN[0], rows_of(1, 9, 576, gap=8)], 512, False, id="rows-of-odd-length"),
        # Rows that begin one element after a memory line.
        pytest.param([rows_of(1, 2, 8, 576, offset=1), TAKEN[1]], 512, False, id="rows-beside-lines"),
    ],
)
def test_what_is_taken(tensors, value_dim, taken, monkeypatch):
    monkeypatch.setattr(hopper, "interpreted", lambda: False)
    with rehearsal(90, lambda kernel: None):
        assert hopper.takes(*tensors, value_dim) is taken
        assert hopper.takes_sum(*tensors, value_dim) is taken
    # The kernels use WGMMA, which Blackwell GPUs do not have.
    with rehearsal(100, lambda kernel: None):
        assert not hopper.takes(*tensors, value_dim)
    monkeypatch.setattr(hopper, "HAS_GLUON", False)
    with rehearsal(90, lambda kernel: None):
        assert not hopper.takes(*tensors, value_dim)


def test_heads_that_the_sum_does_not_hold(monkeypatch):
    monkeypatch.setattr(hopper, "interpreted", lambda: False)
    with rehearsal(90, lambda kernel: None):
        assert hopper.takes(rows_of(1, 2, 200, 576), TAKEN[1], 512)
        # The forward takes 200 heads, but the attention sum over heads does not.
        assert not hopper.takes_sum(rows_of(1, 2, 200, 576), TAKEN[1], 512)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_gradient_that_an_up_projection_leaves_is_taken(batch, monkeypatch):
    # With batch size 1, the first stride is 1, which must not count as a wrong layout.
    monkeypatch.setattr(hopper, "interpreted", lambda: False)
    latent_out = torch.ones(batch, 2, 8, 512, dtype=torch.bfloat16, requires_grad=True)
    value = torch.ones(8, 128, 512, dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(torch.einsum("bshc,hdc->sbhd", latent_out, value).sum(), latent_out)
    tensors = rows_of(batch, 2, 8, 576), rows_of(batch, 9, 576)
    with rehearsal(90, lambda kernel: None):
        assert hopper.takes_backward(*tensors, common.dense_rows(grad), 512, 2048)
    assert torch.equal(common.dense_rows(grad), grad)
    # No copy was made.
    assert common.dense_rows(grad).data_ptr() == grad.data_ptr()


@pytest.mark.parametrize(("heads", "dtype"), SIZES)
def test_results(heads, dtype, hopper_kernels):
    for topk in (129,) if ON_CPU else (65, 129, 300, 2048):
        assert_right(heads, topk, dtype)


def inputs_of(heads, topk, dtype):
    """Return inputs with empty rows, gaps and empty tiles, and a copy of the indices with invalid keys."""
    rows, keys = 6, topk + 25 - topk % 2
    query, key_value = (x.detach() for x in attention_inputs(2, rows, keys, heads, 576, dtype))
    named = random_indices(2, rows, keys, topk, empty_rows=(1,))
    # Row 2 has gaps, row 3 at most one key, row 4 a stretch without keys, row 5 invalid keys.
    named[:, 2, ::3] = -1
    named[:, 3, : topk - 1] = -1
    named[:, 4, 64:192] = -1
    named[:, 5, ::7] = -1
    # Key 0 of the second sequence is selected by no row.
    named[1] = torch.where(named[1] == 0, -1, named[1])
    indices = named.clone()
    indices[:, 5, ::7] = keys + 3
    return query, key_value, named, indices


def assert_right(heads, topk, dtype):
    query, key_value, named, indices = inputs_of(heads, topk, dtype)
    _, expected, expected_lse, probabilities = expected_of(query, key_value, named, 192**-0.5, 512)
    # Keys that no row selects may hold anything.
    key_value[1, 0] = torch.nan
    tensors = (x.to(DEVICE) for x in (query, key_value, indices))
    found = attention.forward(AttentionCall(*tensors, 192**-0.5, 512), True)
    out, lse, summed = (x.cpu() for x in found)
    some = (named >= 0).any(-1)
    assert (out[~some] == 0).all()
    assert (lse[~some] == -torch.inf).all()
    assert torch.isfinite(out).all()
    assert oracle.cosine_distance(out, expected.detach()) < 1e-5
    assert oracle.relative_error(lse[some], expected_lse[some].detach()) < 1e-6
    expected_sum = probabilities.detach().sum(2).gather(-1, named.clamp_min(0).long())
    assert oracle.relative_error(summed, expected_sum.masked_fill(named < 0, 0)) < 1e-5


def many_rows(rows, heads):
    """Return a call with 2,048 of 4,096 keys per row, one of them missing."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    query = torch.randn(1, rows, heads, 576, generator=generator, device=DEVICE).bfloat16()
    key_value = torch.randn(1, 4096, 576, generator=generator, device=DEVICE).bfloat16()
    indices = torch.rand(rows, 4096, generator=generator, device=DEVICE).argsort(-1)[None, :, :2048].int()
    # Row i misses its i-th entry.
    indices[0, torch.arange(rows), torch.arange(rows)] = -1
    return AttentionCall(query, key_value, indices, 0.1, 512)


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_same_bits_every_time_and_as_far_from_the_plain_kernels_as_rounding(heads, hopper_gpu, monkeypatch):
    # More programs than fit on the GPU at once, so their warp groups interleave in every order.
    call = many_rows(1024, heads)
    results = [attention.forward(call, True) for _ in range(5)]
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            assert torch.equal(value, expected)
    monkeypatch.setattr(hopper, "takes", lambda *_: False)
    for value, expected, bound in zip(
        # Bounds of out (bf16), lse (fp32) and the attention sum (fp32).
        results[0],
        attention.forward(call, True),
        (4e-3, 1e-6, 1e-5),
        strict=True,
    ):
        assert (value.float() - expected.float()).norm() < bound * expected.float().norm()


@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        long_on_cpu(1, torch.bfloat16),
        (16, torch.float16),
        (33, torch.bfloat16),
        long_on_cpu(64, torch.float16),
        long_on_cpu(128, torch.bfloat16),
    ],
)
def test_gradients(heads, dtype, deterministic, hopper_kernels):
    torch.use_deterministic_algorithms(deterministic)
    # Few keys make query gradients small differences, which the rounding of the output would dominate.
    for topk in (130,) if ON_CPU else (65, 130, 300):
        query, key_value, named, indices = inputs_of(heads, topk, dtype)
        inputs, expected, _, probabilities = expected_of(query, key_value, named, 192**-0.5, 512)
        grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected_grads = torch.autograd.grad(expected, inputs, grad.double())
        # Key 0 of the second sequence is selected by no row, so NaN must not spread.
        key_value[1, 0] = torch.nan
        tensors = [x.to(DEVICE) for x in (query, key_value, indices)]
        call = AttentionCall(*tensors, 192**-0.5, 512)
        out, lse, _ = attention.forward(call, False)
        # The plain kernels take the second gradient, whose rows are not aligned to memory lines.
        beside = torch.empty(*grad.shape[:-1], 520, dtype=dtype, device=DEVICE)[..., :512].copy_(grad)
        assert hopper.takes_backward(*tensors[:2], grad.to(DEVICE), 512, topk)
        assert not hopper.takes_backward(*tensors[:2], beside, 512, topk)
        for other in (grad.to(DEVICE),) if ON_CPU else (grad.to(DEVICE), beside):
            results = attention.backward(call, other, out, lse, True)
            for value, expected_value in zip(results[:2], expected_grads, strict=True):
                assert torch.isfinite(value).all()
                assert oracle.cosine_distance(value.cpu(), expected_value) < 4e-5
            assert (results[0].cpu()[(named < 0).all(-1)] == 0).all()
            assert (results[1][1, 0] == 0).all()
            expected_sum = probabilities.detach().sum(2).gather(-1, named.clamp_min(0).long())
            assert oracle.relative_error(results[2].cpu(), expected_sum.masked_fill(named < 0, 0)) < 1e-5


@pytest.mark.parametrize("heads", [long_on_cpu(16), 17, 33])
def test_not_a_number_reaches_the_results_that_depend_on_it(
    heads, hopper_kernels, operands_that_are_no_numbers, monkeypatch
):
    """A NaN score makes NaN of the same numbers as in the reference, and of no others, by rows."""
    monkeypatch.setattr(hopper, "prefers_rows", lambda *_: True)
    torch.use_deterministic_algorithms(False)
    query, key_value = (x.detach() for x in attention_inputs(1, 4, 90, heads, 576, torch.bfloat16))
    indices = random_indices(1, 4, 45, 40)
    # The last two rows select other keys than the first two, and only the last one selects key 60.
    indices[:, 2:] = torch.where(indices[:, 2:] < 0, -1, indices[:, 2:] + 45)
    indices[0, 2] = torch.where(indices[0, 2] == 60, -1, indices[0, 2])
    indices[0, 3, 0] = 60
    query[0, 1, 5, 7] = torch.nan
    key_value[0, 60, 3] = torch.nan
    query, key_value, indices = (x.to(DEVICE) for x in (query, key_value, indices))
    inputs = [x.clone().requires_grad_() for x in (query, key_value)]
    expected = sparse_flash_attention(
        *inputs, indices, 0.07, value_dim=512, return_attention_sum=True, backend="reference"
    )
    grad = torch.ones_like(expected.out)
    call = AttentionCall(query, key_value, indices, 0.07, 512)
    out, lse, _ = attention.forward(call, False)
    found = out, *attention.backward(call, grad, out, lse, True)
    grads = torch.autograd.grad(expected.out, inputs, grad)
    # The reference has NaN in such a row also for entries that are no keys.
    summed = expected.attention_sum.masked_fill(indices < 0, 0)
    for value, other in zip(found, (expected.out, *grads, summed), strict=True):
        assert torch.equal(value.isnan(), other.isnan())
        assert 0 < value.isnan().sum() < value.numel()


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_gradients_repeat_and_differ_from_the_plain_kernels_by_rounding(heads, hopper_gpu, monkeypatch):
    # Query gradients always repeat bit for bit. Key gradients do so only under determinism. There are several
    # chunks.
    call = many_rows(600, heads)
    out, lse, _ = attention.forward(call, False)

    def gradients():
        return attention.backward(call, out, out, lse, True)

    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        first = gradients()
        for _ in range(4):
            # Query gradients and sums have a fixed order; key gradients are added with atomics otherwise.
            for value, other, repeats in zip(gradients(), first, (True, deterministic, True), strict=True):
                assert torch.equal(value, other) or not repeats
    with monkeypatch.context() as patch:
        patch.setattr(hopper, "takes", lambda *_: False)
        plain = gradients()
    for value, other, bound in zip(first, plain, (4e-3, 4e-3, 1e-5), strict=True):
        assert (value.float() - other.float()).norm() < bound * other.float().norm()


@pytest.mark.parametrize("way", ["rows", "tiles"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [1, 16, 32, 33, 64, 128])
@pytest.mark.parametrize(("rows", "topk"), [(16, 300), (21, 2048)])
def test_gradients_of_rows_that_share_keys(rows, topk, heads, deterministic, way, hopper_gpu, monkeypatch):
    """Gradients agree with the fp64 formula; a small workspace holds a few rows at a time."""
    torch.use_deterministic_algorithms(deterministic)
    keys = topk + 200
    query, key_value = (x.detach() for x in attention_inputs(2, rows, keys, heads, 576, torch.bfloat16))
    indices = drifting_indices(2, rows, keys, topk, drift=0.05)
    inputs, expected, _, probabilities = expected_of(query, key_value, indices, 192**-0.5, 512)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected_grads = torch.autograd.grad(expected, inputs, grad.double())
    call = AttentionCall(*(x.to(DEVICE) for x in (query, key_value, indices)), 192**-0.5, 512)
    out, lse, _ = attention.forward(call, False)
    seen, by_rows = [], []
    real, of_rows = hopper.gradients_of_keys, hopper.gradients_of_rows

    def gradients_of_keys(inputs, results, tiles, *rest):
        # The low three bits of a task are the number of rows that share its tile.
        first, last = tiles[3][:2].tolist()
        seen.append(int((tiles[2][first:last] % 8).max()))
        real(inputs, results, tiles, *rest)

    monkeypatch.setattr(hopper, "prefers_rows", lambda *_: way == "rows")
    monkeypatch.setattr(hopper, "gradients_of_keys", gradients_of_keys)
    monkeypatch.setattr(hopper, "gradients_of_rows", lambda *given: by_rows.append(of_rows(*given)))
    stored = -(-heads // hopper.backward_heads(heads)) * hopper.backward_heads(heads)
    # Room for 13 rows of bf16 score gradients.
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 13 * topk * stored * 2)
    gradients = attention.backward(call, grad.to(DEVICE), out, lse, True)
    if way == "rows":
        assert (len(by_rows) > 0, seen) == (True, [])
    else:
        assert (by_rows, max(seen)) == ([], 4)
        assert deterministic or len(seen) > 1
    for value, expected_value in zip(gradients[:2], expected_grads, strict=True):
        assert oracle.cosine_distance(value.cpu(), expected_value) < 4e-5
    expected_sum = probabilities.detach().sum(2).gather(-1, indices.clamp_min(0).long())
    assert oracle.relative_error(gradients[2].cpu(), expected_sum.masked_fill(indices < 0, 0)) < 1e-5
