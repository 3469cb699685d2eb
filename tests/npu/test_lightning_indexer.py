"""The NPU backend of the Lightning Indexer against the reference, through torch_npu's own operators."""

from __future__ import annotations

import logging

import pytest
import torch

from mindspeed_dsa import log
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, npu, selected_scores
from mindspeed_dsa.ops.npu import device as device_limits
from mindspeed_dsa.ops.row_ranges import TO_LAST_KEY
from tests.npu import attention_kernels
from tests.npu.counting import counted
from tests.npu.kernel_parts import Call
from tests.ops import oracle
from tests.ops.random_inputs import indexer_inputs, packed_ranges

# Two sequences of a batch may be packed differently.
RANGES = {
    "causal": (None, None),
    "lower-right": (torch.zeros(45).int(), torch.arange(16, 61).int()),
    "packed": packed_ranges(20, 1, 24),
    "packed-by-row": tuple(
        torch.stack(pair) for pair in zip(packed_ranges(20, 25), packed_ranges(7, 31, 7), strict=True)
    ),
}
SEQUENCES = {
    "causal": ("BSND", (45, 45)),
    "lower-right": ("BSND", (45, 45)),
    "packed": ("TND", (20, 1, 24, 20, 1, 24)),
    "packed-by-row": ("TND", (20, 25, 7, 31, 7)),
}


def inputs_of(rows=45, keys=None, heads=8, dtype=torch.bfloat16, batch=2, seed=0):
    inputs = indexer_inputs(batch, rows, keys, heads=heads, dim=128, dtype=dtype, seed=seed)
    return [x.requires_grad_() for x in inputs]


def widened(inputs):
    return [x.detach().float().requires_grad_() for x in inputs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranges", RANGES)
def test_selection_and_scores(npu_kernels, dtype, ranges):
    starts, ends = RANGES[ranges]
    inputs = inputs_of(keys=60 if ranges == "lower-right" else None, dtype=dtype)
    expected = lightning_indexer(*widened(inputs), 12, starts=starts, ends=ends, backend="reference")
    indices, scores = lightning_indexer(*inputs, 12, starts=starts, ends=ends, backend="npu")

    assert npu_kernels == [Call("npu_lightning_indexer", *SEQUENCES[ranges])]
    assert indices.dtype == torch.int32
    assert scores.dtype == torch.float32
    assert torch.equal(indices, expected.topk_indices)
    valid = indices >= 0
    # The operator returns scores in 16 bits.
    assert oracle.relative_error(scores[valid], expected.topk_scores[valid]) < 4e-3
    assert (scores[~valid] == -torch.inf).all()


@pytest.mark.parametrize("key_length", [60, 2**24], ids=["fp32", "int32"])
def test_keys_are_sorted_where_the_vector_units_can(npu_kernels, monkeypatch, key_length):
    """The device's few processor cores would sort integers; unordered selections are not sorted at all."""
    monkeypatch.setattr(npu, "_EXACT_IN_FP32", 61 if key_length == 60 else 60)
    inputs = [x.detach() for x in inputs_of(keys=60)]
    rows = {"ends": torch.arange(16, 61), "form": TO_LAST_KEY, "backend": "npu"}
    with counted() as counts:
        indices, scores = lightning_indexer(*inputs, 12, **rows)
    assert [event.what for event in counts.ai_cpu] == ([] if key_length == 60 else ["sort"])
    with counted() as counts:
        unsorted, of_unsorted = lightning_indexer(*inputs, 12, in_order=False, **rows)
    assert not counts.ai_cpu
    assert not torch.equal(unsorted, indices)
    again, order = unsorted.sort(dim=-1)
    assert torch.equal(again, indices)
    assert torch.equal(of_unsorted.gather(-1, order), scores)


def test_tail_without_order(npu_kernels):
    indices, scores = lightning_indexer(*inputs_of(rows=9), 2048, in_order=False, backend="npu")
    assert torch.equal((indices >= 0).sum(-1), torch.arange(1, 10).expand(2, 9))
    assert (indices[..., 1:] < 0).ge(indices[..., :-1] < 0).all()
    assert torch.equal(scores == -torch.inf, indices < 0)


def test_topk_above_the_number_of_keys(npu_kernels):
    indices = lightning_indexer(*inputs_of(rows=9), 2048, backend="npu").topk_indices
    expected = torch.arange(9).where(torch.ones(9, 9).tril().bool(), -1).int()
    assert torch.equal(indices, expected.expand(2, 9, 9))


def test_strided_inputs_and_fp32_weights(npu_kernels):
    query, key, weights = (x.detach() for x in inputs_of())
    expected = lightning_indexer(query, key, weights, 12, backend="npu")
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, weights.float())]
    result = lightning_indexer(*strided, 12, backend="npu")
    assert torch.equal(result.topk_indices, expected.topk_indices)
    assert torch.equal(result.topk_scores, expected.topk_scores)


@pytest.mark.parametrize("ranges", RANGES)
def test_gradient_of_scores_outside_of_the_operators_sizes(npu_kernels, ranges):
    starts, ends = RANGES[ranges]
    inputs = inputs_of(keys=60 if ranges == "lower-right" else None)
    reference = widened(inputs)
    indices, scores = lightning_indexer(*inputs, 12, starts=starts, ends=ends, backend="npu")
    expected = lightning_indexer(*reference, 12, starts=starts, ends=ends, backend="reference").topk_scores
    check_gradients(inputs, reference, scores, expected, indices >= 0)
    assert [call.name for call in npu_kernels] == ["npu_lightning_indexer"]

    at = selected_scores(*inputs, indices, backend="npu")
    assert oracle.relative_error(at[indices >= 0], expected[indices >= 0]) < 1e-5
    check_gradients(inputs, reference, at, expected, indices >= 0)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_gradient_of_scores_by_the_operator(npu_kernels, monkeypatch, layout):
    """The operator has one size: 64 heads and 2048 entries; rows see fewer keys than that, and more.

    Packed sequences have all their rows: they are tested with an operator that takes fewer entries.
    """
    topk = 2048 if layout == "BSND" else 64
    monkeypatch.setattr(npu, "_GRAD_TOPK", topk)
    monkeypatch.setattr(attention_kernels, "GRAD_TOPK", topk)
    if layout == "BSND":
        queries, some = (40, 40), torch.arange(40)
        inputs = inputs_of(40, 2060, heads=64, batch=2)
        starts, ends = None, torch.arange(2021, 2061)
    else:
        queries, some = (68, 64), torch.tensor([0, 3, 20, 63, 64, 67, 68, 69, 131])
        inputs = inputs_of(132, heads=64, batch=1)
        starts, ends = packed_ranges(*queries)
    indices, scores = lightning_indexer(*inputs, topk, starts=starts, ends=ends, backend="npu")

    # The reference differentiates a few rows: the others get no gradient.
    reference = widened(inputs)
    query, key, weights = reference
    at = selected_scores(query[:, some], key, weights[:, some], indices[:, some], backend="reference")
    check_gradients(inputs, reference, scores[:, some], at, indices[:, some] >= 0)
    assert npu_kernels[-1] == Call("npu_lightning_indexer_grad", layout, queries)


@pytest.mark.parametrize("upstream", [1.0, 1e-4, 1e-6, 1e-7])
def test_small_gradients_survive_fp16(npu_kernels, upstream):
    """The operator takes gradients of the scores in 16 bits: gradients of a mean would underflow."""
    inputs = inputs_of(4, 2060, heads=64, batch=1, dtype=torch.float16)
    inputs[1].data *= 20
    reference = widened(inputs)
    indices, scores = lightning_indexer(*inputs, 2048, ends=torch.arange(2057, 2061), backend="npu")
    expected = selected_scores(*reference, indices, backend="reference")
    factors = upstream * torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((scores * factors).sum(), inputs)
    expected_grads = torch.autograd.grad((expected * factors).sum(), reference)
    assert npu_kernels[-1].name == "npu_lightning_indexer_grad"
    for grad, other in zip(grads, expected_grads, strict=True):
        assert grad.dtype == torch.float16
        # The returned gradients lose at most half of fp16's smallest number.
        assert (grad.float() - other).abs().max() < 4e-3 * other.abs().max() + 2**-25


@pytest.mark.parametrize(
    ("device", "heads", "sentence"),
    [
        ("Ascend910B3", 32, "it takes 64 heads and topk 2048 only"),
        ("Ascend950PR_9579", 64, "it does not run on this device, Ascend 950"),
    ],
)
def test_why_the_gradient_is_computed_in_chunks_is_said_once(
    npu_kernels, monkeypatch, caplog, device, heads, sentence
):
    """At GLM's 32 heads on every product; at 64 heads where the operator is missing."""
    monkeypatch.setattr("torch.npu.get_device_name", lambda device_=None: device)
    device_limits.product.cache_clear()
    inputs = inputs_of(4, 2060, heads=heads, batch=1)
    reference = widened(inputs)
    with caplog.at_level(logging.INFO, log.NAME):
        indices, scores = lightning_indexer(*inputs, 2048, ends=torch.arange(2057, 2061), backend="npu")
        expected = selected_scores(*reference, indices, backend="reference")
        for _ in range(2):
            check_gradients(inputs, reference, scores, expected, indices >= 0)
    assert [call.name for call in npu_kernels] == ["npu_lightning_indexer"]
    (said,) = (record.getMessage() for record in caplog.records if "gradient" in record.getMessage())
    assert said.endswith(f"is computed in chunks (not by npu_lightning_indexer_grad: {sentence})")


def test_deterministic_algorithms_pass_over_the_operator(npu_kernels, monkeypatch):
    monkeypatch.setattr(npu, "_GRAD_HEADS", 8)
    monkeypatch.setattr(npu, "_GRAD_TOPK", 12)
    inputs = inputs_of()
    scores = lightning_indexer(*inputs, 12, backend="npu").topk_scores[:, 12:]
    with pytest.raises(AssertionError, match="npu_lightning_indexer_grad: heads"):
        torch.autograd.grad(scores.sum(), inputs, retain_graph=True)
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(scores.sum(), inputs)
    finally:
        torch.use_deterministic_algorithms(False)


def check_gradients(inputs, reference, scores, expected, valid):
    factors = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((scores[valid] * factors[valid]).sum(), inputs, retain_graph=True)
    expected_grads = torch.autograd.grad(
        (expected[valid] * factors[valid]).sum(), reference, retain_graph=True
    )
    for grad, expected_grad, tensor in zip(grads, expected_grads, inputs, strict=True):
        assert grad.dtype == tensor.dtype
        assert torch.isfinite(grad).all()
        assert oracle.relative_error(grad, expected_grad) < 8e-3
