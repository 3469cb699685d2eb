"""The Triton backward that takes one row at a time on Hopper, for all numbers of heads, in both modes."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from mindspeed_dsa.ops.triton.launch import rehearsal
from tests.ops import oracle
from tests.ops.random_inputs import random_indices
from tests.ops.test_sparse_flash_attention import attention_inputs, expected_of
from tests.ops.triton_backend import DEVICE, attention, hopper

TILE, SCALE = 64, 192**-0.5


def case_of(heads, topk):
    """Return a call with empty rows, gaps, invalid keys and empty tiles; and its indices without invalid
    keys.
    """
    rows, keys = 6, topk + 25 - topk % 2
    query, key_value = (x.detach() for x in attention_inputs(2, rows, keys, heads, 576, torch.bfloat16))
    indices = random_indices(2, rows, keys, topk, empty_rows=(1,))
    # Row 0 has all keys, row 2 gaps, row 3 at most one key, row 4 an empty tile, row 5 invalid keys.
    indices[:, 0] = torch.arange(topk).flip(0)
    indices[:, 2, ::3] = -1
    indices[:, 3, : topk - 1] = -1
    indices[:, 4, TILE : 2 * TILE] = -1
    indices[:, 5, ::7] = -1
    named = indices.clone()
    indices[:, 5, ::7] = keys + 3
    # All scores of one row are far below zero, so exp(-lse) overflows.
    query[1, 2] = -4
    key_value[1] += 1
    return AttentionCall(query.to(DEVICE), key_value.to(DEVICE), indices.to(DEVICE), SCALE, 512), named


# Each group of warps takes two or three tiles of a row, and the last tile is partly empty.
@pytest.mark.parametrize(
    ("heads", "topk", "deterministic"),
    [
        *((17, 330, False), (5, 200, True)),
        *(
            pytest.param(*each, deterministic, marks=pytest.mark.full)
            for each, deterministic in [
                *(((17, 330), True), ((5, 200), False), ((33, 65), False), ((33, 65), True)),
                *(((80, 330), False), ((80, 330), True)),
            ]
        ),
    ],
)
def test_gradients(heads, topk, deterministic, hopper_kernels, monkeypatch):
    """Gradients agree with the fp64 formula; in a fixed order, they do not depend on how rows are cut."""
    torch.use_deterministic_algorithms(deterministic)
    call, named = case_of(heads, topk)
    query, key_value = call.query.cpu(), call.key_value.cpu()
    inputs, expected, _, probabilities = expected_of(query, key_value, named, SCALE, 512)
    out, lse, _ = attention.forward(call, False)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected_grads = torch.autograd.grad(expected, inputs, grad.double())
    monkeypatch.setattr(hopper, "prefers_rows", lambda *_: True)
    seen, real = [], hopper.gradients_of_rows

    def counted(*given):
        seen.append(given[4])
        real(*given)

    monkeypatch.setattr(hopper, "gradients_of_rows", counted)
    *found, summed = attention.backward(call, grad.to(DEVICE), out, lse, True)
    assert seen == [range(12)]
    for value, other in zip(found, expected_grads, strict=True):
        assert torch.isfinite(value).all()
        assert oracle.cosine_distance(value.cpu(), other) < 4e-4
    expected_sum = probabilities.detach().sum(2).gather(-1, named.clamp_min(0).long())
    # Scores near 166 are rounded to 2e-5.
    assert oracle.relative_error(summed.cpu(), expected_sum.masked_fill(named < 0, 0)) < 1e-4
    if deterministic:
        # Room for the gradients of five rows, and order of ten at a time.
        monkeypatch.setattr(attention, "tile_bytes", lambda _: 5 * 4 * topk * 576)
        monkeypatch.setattr(attention, "WORKSPACE_BYTES", 10 * 32 * topk)
        again = attention.backward(call, grad.to(DEVICE), out, lse, True)
        assert seen[1:] == [range(5), range(5, 10), range(10, 12)]
        for value, other in zip(again, (*found, summed), strict=True):
            assert torch.equal(value, other)
        # A launch takes two tiles of as many rows as the workspace holds: the row's other tiles are a part.
        monkeypatch.setattr(attention, "ROW_ENTRIES", 2 * TILE)
        rows_of_part = 5 * topk // (topk if topk <= 2 * TILE else 2 * TILE + 2 * heads)
        again = attention.backward(call, grad.to(DEVICE), out, lse, True)
        chunks = [range(first, min(first + rows_of_part, 12)) for first in range(0, 12, rows_of_part)]
        assert seen[4:] == [rows for rows in chunks for _ in range(-(-topk // (2 * TILE)))]
        for value, other in zip(again, expected_grads, strict=False):
            assert oracle.cosine_distance(value.cpu(), other) < 4e-4
        assert torch.equal(again[2], summed)


# Up to 2048 entries a row passes whole. In parts, gradients of queries take memory too.
@pytest.mark.parametrize(
    ("topk", "heads", "rows"),
    [(64, 128, 3640), (2048, 16, 113), (2048, 128, 113), (2049, 16, 112), (8192, 64, 107), (65536, 128, 101)],
)
def test_rows_that_a_workspace_holds(topk, heads, rows):
    workspace = 512 << 20
    assert attention.rows_per_launch(topk, heads, 576, workspace) == rows
    entries = min(topk, 2048)
    taken = 4 * 576 * (entries + (2 * heads if topk > 2048 else 0))
    assert rows * taken <= workspace < (rows + 1) * taken
    assert attention.rows_per_launch(topk, heads, 576, 1000) == 1


def test_columns_are_put_in_order():
    """The order interleaves each thread's four numbers of 16 columns, and has every column once."""
    column = torch.arange(576)
    places = column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2
    assert places[:16].tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    columns = torch.arange(3 * 576.0).view(3, 576)
    moved = torch.empty_like(columns)
    moved[:, places] = columns
    assert torch.equal(hopper.in_order(moved), columns)


@pytest.mark.parametrize(("heads", "taken"), [(1, True), (33, True), (128, True), (129, False)])
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


@pytest.mark.parametrize(
    ("heads", "topk", "deterministic", "by_rows"),
    [
        *((32, 2048, False, False), (33, 2048, False, True), (128, 2048, False, True)),
        *((129, 2048, False, False), (64, 2048, True, False)),
        # Shared tiles have at most 8192 entries of a row; plain tiles serve more.
        *((16, 8193, False, False), (64, 8193, False, True), (64, 8193, True, False)),
    ],
)
def test_a_way_that_a_gpu_has_run_is_taken(heads, topk, deterministic, by_rows, monkeypatch):
    torch.use_deterministic_algorithms(deterministic)
    monkeypatch.setattr(hopper, "interpreted", lambda: False)
    seen = []
    monkeypatch.setattr(attention, "_backward_by_rows", lambda *_: seen.append(True))
    monkeypatch.setattr(attention, "_backward_by_tiles", lambda *_: seen.append(False))
    query, key_value, out = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((1, 4, heads, 576), (1, 9, 576), (1, 4, heads, 512))
    )
    indices = torch.empty(1, 4, topk, dtype=torch.int32, device="meta")
    lse = torch.empty(1, 4, heads, device="meta")
    with rehearsal(90, lambda kernel: None):
        # Without Triton's compiler: the plain kernels run in an interpreter here.
        monkeypatch.setattr(attention, "row_lengths", lambda *_: None)
        monkeypatch.setattr(attention, "_delta", lambda *_: None)
        attention.backward(AttentionCall(query, key_value, indices, SCALE, 512), out, out, lse, False)
    assert seen == [by_rows]
