from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed_dsa.ops.backend import BackendUnavailable, ShapeClass
from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss, indexer_kl_loss
from mindspeed_dsa.ops.indexer_kl_loss.chunked import divergence_and_gradient
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.lightning_indexer.reference import visible
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from tests.ops import oracle
from tests.ops.random_inputs import indexer_inputs, packed_ranges, random_indices
from tests.ops.test_indexer_kl_loss import SCALE, check, expected_loss, main_inputs
from tests.ops.triton_backend import DEVICE, indexer, kl_loss


def in_both_types(cases):
    """Return the cases in fp32, and in bf16 the first of them; quick runs leave the others out."""
    first, *others = [(torch.bfloat16, *case) for case in cases]
    in_fp32 = [(torch.float32, *case) for case in cases]
    return [*in_fp32, first, *(pytest.param(*case, marks=pytest.mark.full) for case in others)]


def on_device(tensors):
    return [x.to(DEVICE) for x in tensors]


@pytest.fixture
def small_slabs(monkeypatch):
    """Use slabs of five rows, so that every case crosses slab borders."""
    monkeypatch.setattr(indexer, "SLAB_ROWS", 5)


@pytest.mark.parametrize(
    ("dtype", "given", "reduction"),
    in_both_types([("nothing", "mean"), ("nothing", "sum"), ("lse", "mean"), ("scores-and-sum", "sum")]),
)
def test_sparse_form(given, reduction, dtype):
    starts, ends = packed_ranges(3, 5)
    ends[5] = starts[5]
    leaves = [x.requires_grad_() for x in indexer_inputs(2, 8, dtype=dtype)]
    query, key = main_inputs(2, 8, 6, 40, dtype)
    inputs = on_device(leaves)
    main = on_device((query, key))
    indices, scores = lightning_indexer(*inputs, 5, starts=starts, ends=ends, backend="triton")
    attention = sparse_flash_attention(
        *main, indices, SCALE, value_dim=32, return_attention_sum=True, backend="triton"
    )
    extra = {
        "nothing": {},
        "lse": {"lse": attention.lse},
        "scores-and-sum": {"topk_scores": scores, "attention_sum": attention.attention_sum},
    }[given]
    row_mask = torch.ones(2, 8, dtype=torch.bool, device=DEVICE)
    row_mask[0, 6:7] = False
    options = {"row_mask": row_mask, "reduction": reduction, "backend": "triton", **extra}
    loss = indexer_kl_loss(*inputs, *main, indices, SCALE, **options)

    mask = oracle.selected_mask(indices.cpu(), 8)
    expected = expected_loss(leaves, query, key, mask, row_mask.cpu(), reduction)
    check(loss, leaves, *expected)


@pytest.mark.parametrize(
    ("dtype", "per_head", "use_relu"), in_both_types(list(itertools.product([False, True], [True, False])))
)
@pytest.mark.usefixtures("small_slabs")
def test_dense_form(dtype, per_head, use_relu):
    starts, ends = packed_ranges(5, 1, 6)
    ends[7] = starts[7]
    batch = 2 if dtype == torch.float32 else 1
    leaves = [x.requires_grad_() for x in indexer_inputs(batch, 12, dtype=dtype)]
    query, key = main_inputs(batch, 12, 6, 24, dtype, per_head)
    row_mask = torch.rand(batch, 12, generator=torch.Generator().manual_seed(3)) < 0.8
    ranges = {"starts": starts, "ends": ends, "row_mask": row_mask.to(DEVICE)}
    loss = dense_indexer_kl_loss(
        *on_device(leaves), *on_device((query, key)), SCALE, use_relu=use_relu, backend="triton", **ranges
    )
    mask = visible(starts.expand(batch, -1), ends.expand(batch, -1), 12)
    check(loss, leaves, *expected_loss(leaves, query, key, mask, row_mask, "mean", use_relu))


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "index_heads"),
    [
        (torch.float32, 5, 576, 64),
        pytest.param(torch.bfloat16, 128, 576, 64, marks=pytest.mark.full),
        pytest.param(torch.bfloat16, 3, 256, 32, id="glm"),
    ],
)
def test_dense_form_at_full_size(dtype, heads, dim, index_heads):
    # One 576-wide key for all heads, or 256 wide per head. More keys than a tile; a range begins inside a
    # tile.
    keys, per_head = 70, dim != 576
    leaves = [x.requires_grad_() for x in indexer_inputs(1, 2, keys, heads=index_heads, dim=128, dtype=dtype)]
    query, key = main_inputs(1, 2, heads, dim, dtype, per_head, keys=keys)
    # Scaled to the size of trained scores: random 576-wide keys would give one-hot attention.
    query, leaves[0].data = query * 0.2, leaves[0].data * 0.3
    ends = torch.tensor([keys, 69], dtype=torch.int32)
    starts = torch.tensor([0, 61], dtype=torch.int32)
    options = {"starts": starts, "ends": ends, "backend": "triton"}
    loss = dense_indexer_kl_loss(*on_device(leaves), *on_device((query, key)), SCALE, **options)
    mask = visible(starts[None], ends[None], keys)
    check(loss, leaves, *expected_loss(leaves, query, key, mask, None, "mean"))


def test_dense_form_reads_what_rows_see_only():
    # A tile of the key gradient overlaps a target tile that no row sees, and that is never written.
    leaves = [x.requires_grad_() for x in indexer_inputs(1, 2, 130, dtype=torch.bfloat16)]
    query, key = main_inputs(1, 2, 3, 24, torch.bfloat16, keys=130)
    starts, ends = torch.tensor([70, 75], dtype=torch.int32), torch.tensor([120, 128], dtype=torch.int32)
    options = {"starts": starts, "ends": ends, "backend": "triton"}
    loss = dense_indexer_kl_loss(*on_device(leaves), *on_device((query, key)), SCALE, **options)
    mask = visible(starts[None], ends[None], 130)
    check(loss, leaves, *expected_loss(leaves, query, key, mask, None, "mean"))


@pytest.mark.usefixtures("small_slabs")
def test_dense_form_sums_the_target_over_ranks(monkeypatch):
    # Two ranks, one after the other: the first rank's sum is added to the second rank's.
    inputs = indexer_inputs(2, 7)
    query, key = main_inputs(2, 7, 6, 24)
    handed = []
    group = object()

    def record(tensor, group):
        handed.append(tensor.clone())

    def add(tensor, group):
        tensor += handed.pop(0)

    def loss(heads, tp_group):
        leaves = [x.clone().requires_grad_() for x in inputs]
        value = dense_indexer_kl_loss(
            *on_device(leaves), *on_device((heads, key)), SCALE, tp_group=tp_group, backend="triton"
        )
        return value, *torch.autograd.grad(value, leaves)

    expected = loss(query, None)
    monkeypatch.setattr(kl_loss.dist, "all_reduce", record)
    loss(query[:, :, :2], group)
    assert [x.shape[0] for x in handed] == [5, 2] * 2
    monkeypatch.setattr(kl_loss.dist, "all_reduce", add)
    for value, other in zip(loss(query[:, :, 2:], group), expected, strict=True):
        assert oracle.relative_error(value.detach(), other.detach()) < 1e-5
    assert not handed


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_finite_differences(form):
    """The gradient agrees with finite differences of the returned loss."""
    inputs = [x.requires_grad_() for x in indexer_inputs(1, 4, heads=2, dim=3, seed=4)]
    query, key = main_inputs(1, 4, 2, 5)
    indices = torch.tensor([[[0, 1, 3], [2, 1, -1], [-1, -1, -1], [3, 0, 2]]], dtype=torch.int32)

    def loss(*leaves):
        options = {"reduction": "sum", "backend": "triton"}
        if form == "dense":
            return dense_indexer_kl_loss(*on_device((*leaves, query, key)), SCALE, **options)
        return indexer_kl_loss(*on_device((*leaves, query, key, indices)), SCALE, **options)

    grads = torch.autograd.grad(loss(*inputs), inputs)
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(x.shape, generator=generator) for x in inputs]
    step = 1e-2
    with torch.no_grad():
        up, down = (
            loss(*(x + sign * step * d for x, d in zip(inputs, directions, strict=True))) for sign in (1, -1)
        )
    slope = sum((grad * d).sum().item() for grad, d in zip(grads, directions, strict=True))
    assert abs(slope) > 0.1
    assert abs((up - down).item() / (2 * step) - slope) < 2e-3 * abs(slope)


@pytest.mark.parametrize("size", [1, 37, 1500])
def test_divergence_of_rows_of_any_kind(size):
    # Wide rows, empty rows, certain predictions, and targets that underflow to zero.
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(2, 5, size, generator=generator)
    scores[0, 1] *= 200
    target = torch.rand(2, 5, size, generator=generator)
    target[1, 2, ::2] = 0
    valid = torch.rand(2, 5, size, generator=generator) < 0.7
    valid[0, 0] = False
    valid[..., 0] |= valid.any(-1)
    target = target.masked_fill(~valid, 0)
    weights = torch.rand(2, 5, generator=generator)
    weights[1, 1] = 0
    hidden = scores.masked_fill(~valid, -torch.inf)
    arguments = on_device((hidden, target, valid, weights))
    loss, gradient = kl_loss.divergence_and_gradient(*arguments, True)
    expected, expected_gradient = divergence_and_gradient(
        scores.double(), target.double(), valid, weights.double(), True
    )
    assert abs(loss.item() - expected.item()) < 1e-5 * max(1, abs(expected.item()))
    assert (gradient.cpu() - expected_gradient).abs().max() < 1e-6
    assert (gradient.cpu()[~valid] == 0).all()
    assert kl_loss.divergence_and_gradient(*arguments, False)[1] is None


def test_attention_sum_without_its_lse_and_for_any_dim():
    for dim in (5, 24, 96):
        query, key = main_inputs(1, 3, 7, dim, keys=40)
        indices = random_indices(1, 3, 40, 33, empty_rows=(1,))
        main = on_device((query, key, indices))
        summed = kl_loss.attention_sum(AttentionCall(*main, SCALE, dim), None).cpu()
        mask = oracle.selected_mask(indices, 40)
        probabilities = oracle.attention(query, key, mask, SCALE, dim)[2].sum(2)
        expected = probabilities.gather(-1, indices.clamp_min(0).long()).masked_fill(indices < 0, 0)
        assert oracle.relative_error(summed, expected) < 1e-5
        assert (summed[:, 1] == 0).all()


@pytest.mark.usefixtures("small_slabs")
def test_same_inputs_give_the_same_bits_in_both_forms():
    # No atomics are used, so determinism makes no difference.
    query, key = main_inputs(1, 8, 3, 24)
    inputs = indexer_inputs(1, 8)
    results = []
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss = dense_indexer_kl_loss(*on_device(leaves), *on_device((query, key)), SCALE, backend="triton")
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_no_row_counts():
    inputs = [x.requires_grad_() for x in indexer_inputs(1, 4)]
    query, key = main_inputs(1, 4, 2, 16)
    nothing = torch.zeros(1, 4, dtype=torch.bool, device=DEVICE)
    loss = dense_indexer_kl_loss(*on_device((*inputs, query, key)), SCALE, row_mask=nothing, backend="triton")
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize(
    ("dtype", "dim", "index_heads", "reason"),
    [
        (torch.float64, 576, 64, "compute in fp32"),
        (torch.bfloat16, 1000, 64, "512 + 488 numbers"),
        (torch.bfloat16, 576, 200, "these are 200 of 128"),
        (torch.bfloat16, 576, 64, None),
        (torch.bfloat16, 192, 64, None),
        (torch.bfloat16, 256, 32, None),
    ],
)
def test_limits_are_named(dtype, dim, index_heads, reason):
    sizes = (("heads", 16), ("dim", dim), ("key_heads", 1), ("index_heads", index_heads), ("index_dim", 128))
    found = kl_loss.unsupported(ShapeClass("cuda", dtype, (*sizes, ("topk", 8))))
    assert found is None if reason is None else reason in found


def test_an_indexer_in_fp64_is_declined_in_words():
    inputs = on_device([x.double() for x in indexer_inputs(1, 4)])
    main = on_device(main_inputs(1, 4, 2, 16))
    with pytest.raises(
        BackendUnavailable, match="'triton' cannot run this call: its kernels compute in fp32"
    ):
        dense_indexer_kl_loss(*inputs, *main, SCALE, backend="triton")
