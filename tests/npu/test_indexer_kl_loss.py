"""The NPU backend of the indexer loss against the reference, through torch_npu's own operators."""

from __future__ import annotations

import logging

import pytest
import torch

from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss, indexer_kl_loss, npu
from mindspeed_dsa.ops.indexer_kl_loss.npu import parts_of
from mindspeed_dsa.ops.npu.layout import Layout
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.npu import loss_kernels
from tests.npu.kernel_parts import Call
from tests.npu.selected_indices import causal_indices, packed_indices
from tests.ops import oracle
from tests.ops.random_inputs import indexer_inputs, packed_ranges

SCALE = 192**-0.5
SPARSE = "npu_sparse_lightning_indexer_grad_kl_loss"
DENSE = ("npu_dense_lightning_indexer_softmax_lse", "npu_dense_lightning_indexer_grad_kl_loss")


def main_inputs(batch, rows, heads, dtype, keys=None, per_head=False):
    generator = torch.Generator().manual_seed(5)
    dim = 192 if per_head else 576
    key_shape = (batch, rows if keys is None else keys, *((heads,) if per_head else ()), dim)
    query = torch.randn(batch, rows, heads, dim, generator=generator)
    return query.to(dtype), torch.randn(key_shape, generator=generator).to(dtype)


def indexer_leaves(batch, rows, heads=8, keys=None, dtype=torch.bfloat16):
    inputs = indexer_inputs(batch, rows, keys, heads=heads, dim=128, dtype=dtype)
    return [x.requires_grad_() for x in inputs]


def widened(inputs):
    return [x.detach().float().requires_grad_() for x in inputs]


def check(loss, inputs, expected, reference):
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 2e-5 * abs(expected.item())
    # Use a factor other than one: the incoming gradient must be applied, and without reading it.
    grads = torch.autograd.grad(3 * loss, inputs)
    for grad, expected_grad, tensor in zip(
        grads, torch.autograd.grad(3 * expected, reference), inputs, strict=True
    ):
        assert grad.dtype == tensor.dtype
        assert oracle.relative_error(grad, expected_grad) < 8e-3


def sparse_losses(inputs, query, key, indices, backend="reference", **options):
    """Return our loss, the expected loss, and the expected loss's leaves."""
    lse = sparse_flash_attention(query.float(), key.float(), indices, SCALE, value_dim=512, backend="cpu").lse
    reference = widened(inputs)
    expected = indexer_kl_loss(
        *reference, query.float(), key.float(), indices, SCALE, backend=backend, **options
    )
    loss = indexer_kl_loss(*inputs, query, key, indices, SCALE, lse=lse, backend="npu", **options)
    return loss, expected, reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_mean_is_over_batch_and_rows(npu_kernels, dtype, reduction):
    """With two sequences: a division by the rows of one would double the loss."""
    inputs = indexer_leaves(2, 40, dtype=dtype)
    query, key = main_inputs(2, 40, 64, dtype)
    indices = causal_indices(2, 40, 40, 40)
    loss, expected, reference = sparse_losses(inputs, query, key, indices, reduction=reduction)
    check(loss, inputs, expected, reference)
    assert npu_kernels == [Call(SPARSE, "BSND", (40, 40))]


@pytest.mark.parametrize("index_heads", [16, 32])
def test_more_keys_than_rows(npu_kernels, index_heads):
    inputs = indexer_leaves(1, 30, heads=index_heads, keys=50)
    query, key = main_inputs(1, 30, 64, torch.bfloat16, keys=50)
    loss, expected, reference = sparse_losses(inputs, query, key, causal_indices(1, 30, 50, 50))
    check(loss, inputs, expected, reference)
    assert npu_kernels == [Call(SPARSE, "BSND", (30,))]


def test_packed_sequences(npu_kernels):
    inputs = indexer_leaves(2, 45)
    query, key = main_inputs(2, 45, 64, torch.bfloat16)
    indices = torch.stack([packed_indices((20, 1, 24), 45), packed_indices((7, 38), 45)])
    loss, expected, reference = sparse_losses(inputs, query, key, indices)
    check(loss, inputs, expected, reference)
    assert npu_kernels == [Call(SPARSE, "TND", (20, 1, 24, 7, 38))]


# Rows of each call in order, if a call takes at most 16 rows of a sequence.
CUT = {
    "causal": (2, 40, 40, None, [(16, 16)] * 2 + [(8, 8)]),
    "more keys than rows": (1, 30, 50, None, [(16,), (14,)]),
    "packed": (1, 45, 45, ((20, 1, 15, 9),), [(16,), (4,), (1, 15, 9)]),
    "packed, long ones last": (
        *(2, 45, 45, ((3, 4, 38), (7, 38))),
        [(3, 4), (16,), (16,), (6,), (7,), (16,), (16,), (6,)],
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_sequences_longer_than_the_manual_allows_are_cut_into_calls(npu_kernels, monkeypatch, name):
    batch, length, keys, packed, calls = CUT[name]
    monkeypatch.setattr(npu, "_LONGEST_QUERY", 16)
    monkeypatch.setattr(loss_kernels, "LONGEST", 16)
    inputs = indexer_leaves(batch, length, keys=keys)
    query, key = main_inputs(batch, length, 64, torch.bfloat16, keys=keys)
    indices = (
        causal_indices(batch, length, keys, keys)
        if packed is None
        else torch.stack([packed_indices(lengths, keys) for lengths in packed])
    )
    loss, expected, reference = sparse_losses(inputs, query, key, indices)
    check(loss, inputs, expected, reference)
    assert [call.queries for call in npu_kernels] == calls


def test_one_call_where_nothing_is_too_long():
    def parts(length, sequences=None, keys=None):
        layout = Layout(1, length, keys or length, sequences, torch.device("cpu"))
        return parts_of(layout, npu._LONGEST_QUERY, 256)

    assert len(parts(8192, keys=131072)) == 1
    assert [(part.rows.stop, part.keys.stop) for part in parts(20000, keys=30000)] == [
        *((8192, 18192), (16384, 26384), (20000, 30000))
    ]
    assert len(parts(8192 * 4, (8192,) * 4)) == 1
    assert [len(part.ends) for part in parts(300, (1,) * 300)] == [256, 44]


@pytest.mark.parametrize("lengths", [None, (1030, 20)], ids=["BSND", "TND"])
def test_rows_that_see_more_than_topk(npu_kernels, lengths):
    inputs = indexer_leaves(1, 1050)
    query, key = main_inputs(1, 1050, 64, torch.bfloat16)
    indices = causal_indices(1, 1050, 1050, 1024) if lengths is None else packed_indices(lengths, 1024)[None]
    loss, expected, reference = sparse_losses(inputs, query, key, indices, backend="cpu")
    check(loss, inputs, expected, reference)
    assert npu_kernels == [Call(SPARSE, "TND" if lengths else "BSND", lengths or (1050,))]


@pytest.mark.parametrize(
    "why", ["row_mask", "lse", "attention_sum", "heads", "rows", "relu", "sink", "deterministic"]
)
def test_what_the_operator_does_not_take_is_computed_in_chunks(npu_kernels, caplog, why):
    inputs = indexer_leaves(2, 40)
    query, key = main_inputs(2, 40, 32 if why == "heads" else 64, torch.bfloat16)
    indices = causal_indices(2, 40, 40, 40)
    if why == "rows":
        indices[:, 7] = -1
    sink = torch.linspace(-2, 3, 64) if why == "sink" else None
    attention = sparse_flash_attention(
        *(query.float(), key.float(), indices, SCALE),
        value_dim=512,
        sink=sink,
        return_attention_sum=True,
        backend="cpu",
    )
    row_mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"row_mask": row_mask} if why == "row_mask" else {"sink": sink}
    if why == "relu":
        options["use_relu"] = False
    statistics = (
        {"attention_sum": attention.attention_sum} if why == "attention_sum" else {"lse": attention.lse}
    )
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        reference = widened(inputs)
        expected = indexer_kl_loss(
            *reference, query.float(), key.float(), indices, SCALE, backend="reference", **options
        )
        for _ in range(2):
            loss = indexer_kl_loss(
                *inputs,
                query,
                key,
                indices,
                SCALE,
                backend="npu",
                **options,
                **({} if why == "lse" else statistics),
            )
        check(loss, inputs, expected, reference)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not npu_kernels
    # An attention_sum requests the other way; it is not a refusal.
    sentences = {
        "row_mask": "row_mask must be None",
        "lse": "needs the lse",
        "heads": "takes 64 or 128 heads",
        "rows": "some row lists another number of keys",
        "relu": "always clamps",
        "sink": "has no sink",
        "deterministic": "no fixed order",
    }
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == (why in sentences)
    assert all(sentences[why] in message for message in messages)


def test_gradient_that_only_the_scores_want(npu_kernels):
    """A caller may detach the indexer's inputs and pass scores: the gradient flows through the scores."""
    inputs = [x.detach() for x in indexer_leaves(1, 40)]
    query, key = main_inputs(1, 40, 64, torch.bfloat16)
    indices = causal_indices(1, 40, 40, 40)
    scores = torch.randn(1, 40, 40).masked_fill(indices < 0, -torch.inf).requires_grad_()
    lse = sparse_flash_attention(query.float(), key.float(), indices, SCALE, value_dim=512, backend="cpu").lse
    grads = [
        torch.autograd.grad(
            indexer_kl_loss(
                *inputs, query, key, indices, SCALE, lse=lse, topk_scores=scores, backend=backend
            ),
            scores,
        )[0]
        for backend in ("npu", "reference")
    ]
    assert not npu_kernels
    assert grads[1].abs().max() > 0
    # In the reference the attention's probabilities come from 16-bit inputs as well.
    assert oracle.relative_error(*grads) < 1e-5


DENSE_RANGES = {
    "causal": (None, None, ("BSND", (40, 40))),
    "lower-right": (torch.zeros(40).int(), torch.arange(16, 56).int(), ("BSND", (40, 40))),
    "packed": (*packed_ranges(15, 1, 24), ("TND", (15, 1, 24, 15, 1, 24))),
}


@pytest.mark.parametrize("ranges", DENSE_RANGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide_weights", [False, True])
def test_dense_form(npu_kernels, ranges, dtype, wide_weights):
    starts, ends, where = DENSE_RANGES[ranges]
    keys = 55 if ranges == "lower-right" else 40
    inputs = indexer_leaves(2, 40, heads=16, keys=keys, dtype=dtype)
    if wide_weights:
        inputs[2] = inputs[2].detach().float().requires_grad_()
    query, key = main_inputs(2, 40, 32, dtype, keys=keys, per_head=True)
    reference = widened(inputs)
    rows = {"starts": starts, "ends": ends}
    expected = dense_indexer_kl_loss(
        *reference, query.float(), key.float(), SCALE, backend="reference", **rows
    )
    loss = dense_indexer_kl_loss(*inputs, query, key, SCALE, backend="npu", **rows)
    check(loss, inputs, expected, reference)
    assert npu_kernels == [Call(name, *where) for name in DENSE]
