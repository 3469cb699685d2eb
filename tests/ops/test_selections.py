"""Windows beside selections and keys of pools, against lists that Python builds row by row."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import dsa
from mindspeed_dsa.ops.dsa import selections
from tests.ops import oracle
from tests.ops.random_inputs import indexer_inputs, packed_ranges, random_indices
from tests.ops.test_dsa_layer import SCALE, VALUE, expected, main_inputs


def bounds(rows, keys, seed):
    """Return starts and ends of rows; some rows see nothing."""
    generator = torch.Generator().manual_seed(seed)
    starts, ends = (torch.randint(0, keys + 1, (2, rows), generator=generator) for _ in range(2))
    return torch.minimum(starts, ends), torch.maximum(starts, ends)


SIZES = [(1, 1, 1), (9, 40, 1), (9, 40, 45), (7, 33, 5), (8, 12, 4), (6, 40, 7), (5, 3, 6)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rows", "keys", "window"), SIZES)
def test_a_window_beside_a_selection(rows, keys, window, seed):
    starts, ends = bounds(rows, keys, seed)
    topk = min(keys, 12)
    indices = random_indices(2, rows, keys, topk, seed, empty_rows=(seed % rows,))
    found = dsa.with_window(indices, window, keys, starts=starts, ends=ends)
    assert found.dtype == torch.int32
    for b in range(2):
        for t in range(rows):
            first, end = int(starts[b, t]), int(ends[b, t])
            recent = list(range(max(first, end - window), end))
            older = [key for key in indices[b, t].tolist() if key >= 0 and key not in recent]
            row = older + recent
            assert found[b, t].tolist() == row + [-1] * (topk + window - len(row))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rows", "keys", "pool"), SIZES)
def test_the_keys_of_pools_and_the_tail(rows, keys, pool, seed):
    _, ends = bounds(rows, keys, seed)
    pools = -(-keys // pool)
    topk = min(pools, 5)
    indices = random_indices(2, rows, pools, topk, seed, empty_rows=(seed % rows,)).long()
    # As the contract of the tail says, rows select complete pools alone.
    indices = indices.masked_fill(indices >= ends[..., None] // pool, -1).sort(-1, descending=True).values
    for with_tail in (False, True):
        found = dsa.keys_of_pools(indices, pool, keys, with_tail=with_tail, ends=ends)
        for b in range(2):
            for t in range(rows):
                end = int(ends[b, t])
                row = [i * pool + j for i in indices[b, t].tolist() if i >= 0 for j in range(pool)]
                row += range(end - end % pool, end) if with_tail else []
                width = topk * pool + (pool - 1 if with_tail else 0)
                assert found[b, t].tolist() == row + [-1] * (width - len(row))


def test_pools_that_a_row_sees_in_part_are_cut():
    indices = torch.tensor([[[1, 0], [2, 1]]])
    found = dsa.keys_of_pools(indices, 4, 10, starts=torch.tensor([2, 0]), ends=torch.tensor([7, 9]))
    assert found.tolist() == [[[4, 5, 6, 2, 3, -1, -1, -1], [8, 4, 5, 6, 7, -1, -1, -1]]]


def test_rows_are_listed_in_parts(monkeypatch):
    indices = random_indices(2, 20, 30, 6)
    options = {"starts": packed_ranges(13, 7)[0], "ends": packed_ranges(13, 7)[1]}
    whole = dsa.with_window(indices, 5, 30, **options)
    monkeypatch.setattr(selections, "_ENTRIES", 25)
    assert torch.equal(dsa.with_window(indices, 5, 30, **options), whole)


def test_a_layer_with_a_window_trains_its_indexer_on_all_keys():
    rows, form = 24, dsa.RowForm((10, 14, 20, 4))
    main = main_inputs(True)
    index = [x.double().requires_grad_() for x in indexer_inputs(2, rows, heads=24)]
    selected = dsa.lightning_indexer(*index, 3, form=form).topk_indices
    listed = dsa.with_window(selected, 4, rows, form=form)
    result = dsa.deepseek_sparse_attention(
        *main,
        *index,
        topk=3,
        softmax_scale=SCALE,
        value_dim=VALUE,
        selected=dsa.IndexerOutput(listed, None),
        with_loss=True,
        form=form,
    )
    mask = oracle.selected_mask(listed, rows)
    assert mask.sum(-1).amax() == 7
    assert mask.sum(-1).amin() == 1
    out, loss = expected(*main, index, mask)
    oracle.assert_close(result.out, out)
    oracle.assert_close(result.loss, loss)
    leaves = [x for x in (*main, *index) if x is not None]
    for mine, theirs in zip(
        torch.autograd.grad(result.out.sin().sum() + result.loss, leaves),
        torch.autograd.grad(out.sin().sum() + loss, leaves),
        strict=True,
    ):
        oracle.assert_close(mine, theirs, backward=True)


def test_pools_are_selected_by_one_key_each():
    """The selection of GLM-5-next: complete pools by a mean of their keys, and the tail by itself."""
    pool, rows = 4, 27
    query, key, weights = indexer_inputs(2, rows, heads=24)
    pooled = key[:, : rows // pool * pool].unflatten(1, (-1, pool)).mean(2)
    ends = torch.arange(1, rows + 1)
    best = dsa.lightning_indexer(query, pooled, weights, 2, ends=ends // pool).topk_indices
    found = dsa.keys_of_pools(best, pool, rows, with_tail=True)
    scores = oracle.index_scores(query, pooled, weights)
    for t in range(rows):
        count = min(2, (t + 1) // pool)
        for b in range(2):
            pools = scores[b, t, : (t + 1) // pool].topk(count).indices.tolist()
            keys = {i * pool + j for i in pools for j in range(pool)} | set(
                range((t + 1) // pool * pool, t + 1)
            )
            assert {key for key in found[b, t].tolist() if key >= 0} == keys


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: dsa.with_window(x, 0, 9), "window must be at least 1, got 0"),
        (lambda x: dsa.with_window(x.float(), 1, 9), "must be int32 or int64, got torch.float32"),
        (lambda x: dsa.with_window(x[0], 1, 9), r"must be \[batch, rows, topk\]"),
        (lambda x: dsa.with_window(x, 1, 10), "is ambiguous; pass ends"),
        (lambda x: dsa.keys_of_pools(x, 0, 9), "pool must be at least 1, got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(1, 9, 2, dtype=torch.int64))
