from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.ops.backend import BackendUnavailable, ShapeClass, choose
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from tests.ops import oracle
from tests.ops.random_inputs import indexer_inputs, packed_ranges, tied_inputs
from tests.ops.test_lightning_indexer import best_of, causal, masked_scores
from tests.ops.triton_backend import DEVICE, common, indexer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Capacity of the selection's list of scores, where a test calls the kernel directly.
LIST = 512


def on_device(tensors):
    return [x.to(DEVICE) for x in tensors]


def run(inputs, topk, **options):
    result = lightning_indexer(*on_device(inputs), topk, backend="triton", **options)
    return result.topk_indices.cpu(), result.topk_scores.cpu()


@pytest.mark.parametrize("use_relu", [True, False])
def test_ties_go_to_the_lower_position(use_relu):
    inputs = tied_inputs(batch=1, rows=24)
    scores = masked_scores(inputs, *causal(24), use_relu)
    assert (scores.sort(-1).values.diff() == 0).any(-1).float().mean() > 0.8, "the case has few ties"
    indices, _ = run(inputs, 5, use_relu=use_relu)
    assert indices.dtype == torch.int32
    assert torch.equal(indices, best_of(scores, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_selects_the_highest_scores_among_many_keys(dtype):
    # More keys than a tile of scores or a selection block holds; topk is a multiple of neither.
    inputs = indexer_inputs(1, 3, 2600, heads=16, dim=32, dtype=dtype)
    ends = torch.tensor([17, 1999, 2600], dtype=torch.int32)
    scores = masked_scores(inputs, torch.zeros(3, dtype=torch.int32), ends)
    indices, chosen_scores = run(inputs, 50, ends=ends)
    best = scores.topk(51).values
    seen = best[..., :50] > -torch.inf
    chosen_scores = chosen_scores.double().sort(descending=True).values
    assert torch.equal(chosen_scores > -torch.inf, seen)
    assert oracle.relative_error(chosen_scores[seen], best[..., :50][seen]) < 1e-6
    apart = best[..., 49] - best[..., 50] > 1e-4
    assert apart.sum() >= 2
    assert torch.equal(indices[apart], best_of(scores, 50)[apart])


def select_from(slab, starts, ends, topk, sample=64):
    """Run only the selection kernel on given scores; also return the keys that it listed, -9 after the
    last.
    """
    rows, keys = slab.shape
    indices = torch.full((rows, topk), 7, dtype=torch.int32, device=DEVICE)
    scores = torch.full((rows, topk), torch.nan, device=DEVICE)
    listed = torch.full((rows, LIST), -9, dtype=torch.int32, device=DEVICE)
    listed_scores = torch.full((rows, LIST), torch.nan, device=DEVICE)
    arguments = (slab.to(DEVICE), starts.to(DEVICE), ends.to(DEVICE), listed, listed_scores)
    indexer.select_kernel[(rows,)](
        *arguments, indices, scores, keys, topk, LIST=LIST, SAMPLE=sample, BLOCK=256
    )
    return indices.cpu(), scores.cpu(), listed.cpu()


@pytest.mark.parametrize("kind", ["any-bits", "few-values", "one-value", "signed-zeros"])
def test_selection_orders_every_float(kind):
    generator = torch.Generator().manual_seed(2)
    rows, keys, topk = 4, 700, 300
    bits = torch.randint(-(2**31), 2**31 - 1, (rows, keys), generator=generator).int()
    slab = {
        "any-bits": bits.view(torch.float32),
        "few-values": (bits % 3).float(),
        "one-value": torch.full((rows, keys), -2.5),
        "signed-zeros": torch.where(bits > 0, 0.0, -0.0),
    }[kind]
    slab = torch.where(slab.isnan(), 0.0, slab).contiguous()
    starts = torch.tensor([0, 13, 400, 699], dtype=torch.int32)
    ends = torch.tensor([700, 690, 700, 700], dtype=torch.int32)
    position = torch.arange(keys)
    seen = (position >= starts[:, None]) & (position < ends[:, None])
    # NaN shows if the kernel reads keys that a row does not see.
    indices, scores, _ = select_from(slab.masked_fill(~seen, torch.nan), starts, ends, topk)
    expected = best_of(torch.where(seen, slab.clamp_min(-3e38), -torch.inf), topk)
    assert torch.equal(indices, expected)
    valid = indices >= 0
    assert torch.equal(scores[valid], slab.gather(-1, indices.clamp_min(0).long())[valid])
    assert (scores[~valid] == -torch.inf).all()


@pytest.mark.parametrize("case", ["short", "guessed", "guessed-twice", "sample-too-high", "ties"])
def test_selection_lists_what_it_needs_or_counts(case):
    # A list that is too short or too long is not used, and the result does not depend on it.
    keys, topk = 1500, 200
    slab = torch.randn(1, keys, generator=torch.Generator().manual_seed(8))
    # A sample of 16 takes eight neighbours at each of two places.
    if case == "guessed-twice":
        slab[:, :8], slab[:, 744:760] = -9.0, -9.0
    elif case == "sample-too-high":
        slab[:, :8], slab[:, 744:760] = 9.0, 9.0
    elif case == "ties":
        slab[:, 50:1450] = 1.0
    end = LIST if case == "short" else keys
    sample = 1024 if case in ("guessed", "ties") else 16
    indices, scores, listed = select_from(slab, *torch.tensor([[0], [end]]).int(), topk, sample)
    assert torch.equal(indices, best_of(slab[:, :end].double(), topk))
    assert torch.equal(scores, slab.gather(-1, indices.long()))
    count = int((listed != -9).sum())
    if case == "sample-too-high":
        assert count < topk
    elif case == "guessed":
        assert topk <= count < LIST
    else:
        assert count == LIST
        # The first guess lists the first positions, the second guess positions all over the row.
        assert (listed[0].max() > 1400) == (case == "guessed-twice")


def test_packed_rows_in_slabs_and_megatron_layout(monkeypatch):
    """Ranges are respected, empty rows get no keys, and neither slab borders nor strides matter."""
    monkeypatch.setattr(indexer, "SELECTED_ROWS", 7)
    inputs = indexer_inputs(2, 20)
    starts, ends = packed_ranges(6, 1, 13)
    ends[9] = starts[9]
    expected = best_of(masked_scores(inputs, starts, ends), 4)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    strided[0] = strided[0].transpose(2, 3).contiguous().transpose(2, 3)
    assert not strided[1].is_contiguous()
    indices, scores = run(strided, 4, starts=starts, ends=ends)
    assert torch.equal(indices, expected)
    assert (indices[:, 9] == -1).all()
    assert (scores[:, 9] == -torch.inf).all()


def test_slabs_stay_within_their_bytes():
    assert indexer.slab_rows(10**6, 4096) == 1024
    assert indexer.slab_rows(10**6, 128 * 1024) * 128 * 1024 * 4 <= 256 << 20
    assert indexer.slab_rows(10, 4096) == 10
    assert indexer.slab_rows(10**6, 10**9) == 1
    assert indexer.selected_rows(10**6, 8192, 4096) == 4096
    assert indexer.selected_rows(10, 8192, 4096) == 10
    assert indexer.selected_rows(10**6, 128 * 1024, 4096) * (128 * 1024 * 4 + 4096 * 8) <= 256 << 20
    assert indexer.selected_rows(10**6, 10**9, 4096) == 1


def test_takes_every_visible_key_when_topk_is_large():
    indices, _ = run(indexer_inputs(1, 9), 512)
    expected = torch.arange(9).expand(9, 9).tril() - torch.ones(9, 9).triu(1)
    assert torch.equal(indices[0], expected.int())


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [
        *((5, 24, dtype) for dtype in DTYPES),
        *((heads, 128, torch.bfloat16) for heads in (64, 32)),
        (1, 16, torch.float32),
    ],
)
@pytest.mark.parametrize("deterministic", [pytest.param(True, marks=pytest.mark.full), False])
def test_scores_and_their_gradients(heads, dim, dtype, deterministic, monkeypatch):
    torch.use_deterministic_algorithms(deterministic)
    # Chunks of three rows, so that gradients are summed over chunks.
    monkeypatch.setattr(indexer, "tile_bytes", lambda total: 3 * 4 * 70 * dim)
    use_relu = heads != 1
    inputs = [x.requires_grad_() for x in indexer_inputs(2, 4, 90, heads=heads, dim=dim, dtype=dtype)]
    starts = torch.tensor([[0, 5, 3, 0], [0, 0, 9, 0]], dtype=torch.int32)
    ends = torch.tensor([[90, 85, 3, 2], [75, 40, 90, 90]], dtype=torch.int32)
    leaves = on_device(inputs)
    options = {"use_relu": use_relu, "backend": "triton"}
    indices, scores = lightning_indexer(*leaves, 70, starts=starts, ends=ends, **options)
    factors = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    valid = indices.cpu() >= 0
    assert not valid[0, 2].any()
    expected_inputs = [x.detach().double().requires_grad_() for x in inputs]
    expected = oracle.index_scores(*expected_inputs, use_relu)
    expected = expected.gather(-1, indices.cpu().clamp_min(0).long())
    expected_grads = torch.autograd.grad((expected[valid] * factors[valid]).sum(), expected_inputs)
    for topk_scores in (scores, selected_scores(*leaves, indices, **options)):
        topk_scores = topk_scores.cpu()
        oracle.assert_close(topk_scores[valid].detach(), expected[valid].detach())
        assert (topk_scores[~valid] == -torch.inf).all()
        grads = torch.autograd.grad((topk_scores[valid] * factors[valid]).sum(), inputs)
        for grad, expected_grad, tensor in zip(grads, expected_grads, inputs, strict=True):
            assert grad.dtype == tensor.dtype
            if dtype == torch.float16:
                assert oracle.cosine_distance(grad, expected_grad) < 1e-5
            else:
                oracle.assert_close(grad, expected_grad, backward=True)


def test_weights_may_stay_in_fp32():
    query, key, weights = indexer_inputs(1, 8, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (query, key, (weights * 1.001).float())]
    _, scores = lightning_indexer(*on_device(leaves), 3, backend="triton")
    expected = oracle.index_scores(query, key, leaves[2].detach()).masked_fill(
        torch.ones(8, 8).triu(1).bool(), -torch.inf
    )
    seen = scores.cpu() > -torch.inf
    chosen = scores.detach().cpu()[seen].double().sort().values
    assert oracle.relative_error(chosen, expected.detach().topk(3).values[seen].sort().values) < 1e-6
    scores[seen].sum().backward()
    assert leaves[2].grad.dtype == torch.float32


def test_same_inputs_give_the_same_bits():
    inputs = indexer_inputs(1, 12, heads=8, dim=64)
    results = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in inputs]
        indices, scores = lightning_indexer(*on_device(leaves), 5, backend="triton")
        grads = torch.autograd.grad(scores[indices >= 0].sin().sum(), leaves)
        results.append((indices, scores, *grads))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 6),
    keys=st.integers(1, 300),
    heads=st.integers(1, 5),
    dim=st.sampled_from([1, 3, 16, 33]),
    topk=st.integers(1, 310),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_range(rows, keys, heads, dim, topk, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randint(-2, 3, shape, generator=generator).float()
        for shape in ((1, rows, heads, dim), (1, keys, dim), (1, rows, heads))
    ]
    starts, ends = torch.randint(0, keys + 1, (2, 1, rows), generator=generator, dtype=torch.int32)
    indices, _ = run(inputs, topk, starts=starts, ends=ends)
    assert torch.equal(indices, best_of(masked_scores(inputs, starts, ends), topk))


@pytest.mark.parametrize(
    ("device", "dtype", "heads", "dim", "reason"),
    [
        ("cuda", torch.float64, 4, 16, "compute in fp32"),
        ("cuda", torch.bfloat16, 129, 128, "at most 128 of 256 numbers, and these are 129 of 128"),
        ("cuda", torch.bfloat16, 64, 257, "these are 64 of 257"),
        ("npu", torch.bfloat16, 64, 128, "runs on CUDA devices"),
        ("cuda", torch.bfloat16, 128, 256, None),
    ],
)
def test_limits_are_named(device, dtype, heads, dim, reason):
    sizes = (("heads", heads), ("head_dim", dim), ("topk", 8))
    found = indexer.unsupported(ShapeClass(device, dtype, sizes))
    assert found is None if reason is None else reason in found


def test_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(common, "interpreted", lambda: False)
    choose.cache_clear()
    with pytest.raises(BackendUnavailable, match="TRITON_INTERPRET=1 in the environment"):
        lightning_indexer(*indexer_inputs(1, 4), 2, backend="triton")
    choose.cache_clear()
