"""The Triton backward that takes one row and 64 heads at a time, with its Gluon kernel written in PyTorch.

The stand-in has the kernel's tiles, orders of sums and columns, roundings, and its reads for invalid keys.
The choice of the kernel and the handling of its results are the real code.
"""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from mindspeed_dsa.ops.triton.launch import rehearsal
from tests.ops import oracle
from tests.ops.random_inputs import drifting_indices, random_indices
from tests.ops.test_sparse_flash_attention import attention_inputs, expected_of
from tests.ops.triton_backend import DEVICE, attention, hopper

TILE, FEW, HEADS, SCALE = 64, 32, 64, 192**-0.5
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the kernel itself is tested")


def places():
    """Return the column at which the kernel adds each of a key's columns."""
    column = torch.arange(576)
    return column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2


def gradients_of_rows(inputs, results, indices, lengths, softmax_scale):
    """Write the kernel's results, computed in PyTorch."""
    query, key_value, grad_out, lse, delta = inputs
    grad_query, grad_keys, summed = results
    (batch, rows, heads, _), keys = query.shape, key_value.shape[1]
    added = torch.zeros_like(grad_keys)
    for row in range(batch * rows):
        of_batch, place = divmod(row, rows)
        length = int(lengths[row])
        for first in range(0, heads, HEADS):
            of_heads = slice(first, min(first + HEADS, heads))
            of_row, of_grad = (
                query[of_batch, place, of_heads].float(),
                grad_out[of_batch, place, of_heads].float(),
            )
            norm = lse.view(-1, heads)[row, of_heads, None]
            row_delta = delta.view(-1, heads)[row, of_heads, None]
            acc = torch.zeros_like(of_row)
            for tile in range(0, length, TILE):
                weights, gradients, gathered, kept = [], [], [], []
                for begin in range(tile, tile + TILE, FEW):
                    index = torch.full((FEW,), -1)
                    of_entries = indices[of_batch, place, begin : min(begin + FEW, length)]
                    index[: len(of_entries)] = of_entries
                    valid = (index >= 0) & (index < keys)
                    key = torch.where(
                        valid[:, None], key_value[of_batch, index.clamp(0, keys - 1)], 0
                    ).float()
                    # A weight above 1 is only rounding.
                    weight = torch.exp((of_row @ key.T * softmax_scale - norm).clamp_max(0))
                    inner = of_grad @ key[:, :512].T
                    gradient = weight * (inner * softmax_scale - row_delta * softmax_scale)
                    if summed is not None:
                        summed[of_batch, place, begin + valid.nonzero()[:, 0]] += weight.sum(0)[valid]
                    # Tensor cores take both operands in the input dtype.
                    weights.append(weight.to(query.dtype).float())
                    gradients.append(gradient.to(query.dtype).float())
                    gathered.append(key)
                    kept.append((index, valid))
                weight, gradient, key = torch.cat(weights, 1), torch.cat(gradients, 1), torch.cat(gathered)
                acc += gradient @ key
                sums = gradient.T @ of_row
                sums[:, :512] += weight.T @ of_grad
                index, valid = (torch.cat(each) for each in zip(*kept, strict=True))
                added.index_add_(0, of_batch * keys + index[valid], sums[valid])
            grad_query[of_batch, place, of_heads] = acc.to(grad_query.dtype)
    # The kernel leaves columns in its own order, which `in_order` undoes.
    grad_keys[:, places()] = added
    grad_keys.copy_(hopper.in_order(grad_keys))


def case_of(heads, topk, dtype):
    """Return a call with empty rows, gaps, invalid keys and empty tiles; and its indices without invalid
    keys.
    """
    rows, keys = 6, topk + 25
    query, key_value = (x.detach() for x in attention_inputs(2, rows, keys, heads, 576, dtype))
    indices = random_indices(2, rows, keys, topk, empty_rows=(1,))
    # Row 2 has gaps, row 3 at most one key, row 4 an empty tile, row 5 invalid keys.
    indices[:, 2, ::3] = -1
    indices[:, 3, : topk - 1] = -1
    indices[:, 4, TILE : 2 * TILE] = -1
    indices[:, 5, ::7] = -1
    named = indices.clone()
    indices[:, 5, ::7] = keys + 3
    # All scores of one row are far below zero, so exp(-lse) overflows.
    query[1, 2] = -4
    key_value[1] += 1
    return AttentionCall(query, key_value, indices, SCALE, 512), named


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("heads", "topk"),
    [(33, 65), *(pytest.param(*each, marks=pytest.mark.full) for each in [(64, 200), (80, 130)])],
)
def test_gradients(heads, topk, dtype, monkeypatch):
    """Gradients agree with the fp64 formula; the unrounded sum over heads agrees with the tiled kernel's."""
    torch.use_deterministic_algorithms(False)
    call, named = case_of(heads, topk, dtype)
    inputs, expected, _, _ = expected_of(call.query, call.key_value, named, SCALE, 512)
    out, lse, _ = attention.forward(call, False)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    *_, of_tiles = attention.backward(call, grad, out, lse, True)
    # Force the kernel under test, which is otherwise chosen on Hopper only.
    seen = []
    monkeypatch.setattr(hopper, "takes_rows", lambda *_: True)
    monkeypatch.setattr(hopper, "gradients_of_rows", lambda *given: seen.append(gradients_of_rows(*given)))
    *found, summed = attention.backward(call, grad, out, lse, True)
    assert len(seen) == 1
    for value, other in zip(found, torch.autograd.grad(expected, inputs, grad.double()), strict=True):
        assert torch.isfinite(value).all()
        assert oracle.cosine_distance(value, other) < (1e-9 if dtype == torch.float32 else 4e-4)
    # Scores near 166 are rounded to 2e-5.
    assert oracle.relative_error(summed, of_tiles) < 1e-4


def test_columns_are_put_in_order():
    """The order interleaves each thread's four numbers of 16 columns, and has every column once."""
    assert places()[:16].tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    columns = torch.arange(3 * 576.0).view(3, 576)
    moved = torch.empty_like(columns)
    moved[:, places()] = columns
    assert torch.equal(hopper.in_order(moved), columns)


@pytest.mark.parametrize(("heads", "taken"), [(32, False), (33, True), (64, True), (128, True), (129, False)])
def test_heads_that_it_takes(heads, taken, monkeypatch):
    monkeypatch.setattr(hopper, "interpreted", lambda: False)
    query, key_value, grad = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((1, 4, heads, 576), (1, 9, 576), (1, 4, heads, 512))
    )
    # Rows of 520 columns do not begin at memory lines.
    beside = torch.empty(1, 4, heads, 520, dtype=torch.bfloat16, device="meta")[..., :512]
    with rehearsal(90, lambda kernel: None):
        assert hopper.takes_rows(query, key_value, grad, 512) == taken
        assert not hopper.takes_rows(query, key_value, beside, 512)
        assert not hopper.takes_rows(query.float(), key_value.float(), grad.float(), 512)
    with rehearsal(80, lambda kernel: None):
        assert not hopper.takes_rows(query, key_value, grad, 512)


@on_cpu
def test_sums_in_a_fixed_order_are_asked_of_tiles(monkeypatch):
    query, key_value = (x.detach() for x in attention_inputs(1, 4, 90, 33, 576, torch.float32))
    call = AttentionCall(query, key_value, drifting_indices(1, 4, 90, 70, drift=0.05), SCALE, 512)
    out, lse, _ = attention.forward(call, False)
    monkeypatch.setattr(hopper, "takes_rows", lambda *_: True)

    # The kernel adds key gradients with atomics, so a fixed order must use tiles of keys.
    def refused(*_):
        raise AssertionError("its atomics have no order")

    monkeypatch.setattr(hopper, "gradients_of_rows", refused)
    torch.use_deterministic_algorithms(True)
    assert torch.isfinite(attention.backward(call, out, out, lse, False)[1]).all()
