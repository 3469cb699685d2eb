"""Windows beside selections and keys of pools, against lists that Python builds row by row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.ops import dsa
from mindspeed_dsa.ops.dsa import selections
from tests.ops import oracle
from tests.ops.random_inputs import BACKENDS, indexer_inputs, packed_ranges, random_indices
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


def test_a_tail_of_which_the_pool_is_selected_is_listed_once():
    indices = torch.tensor([[[1, 0], [2, 1]]])
    options = {"starts": torch.tensor([0, 0]), "ends": torch.tensor([7, 9])}
    found = dsa.keys_of_pools(indices, 4, 10, with_tail=True, **options)
    assert found[..., :7].tolist() == [[[0, 1, 2, 3, 4, 5, 6], [4, 5, 6, 7, 8, -1, -1]]]
    assert (found[..., 7:] == -1).all()


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


def check_pools(backend, device="cpu"):
    """Compare pools, scores and gradients with the formula, for rows with every kind of range."""
    rows, keys, pool, topk = 21, 30, 4, 3
    inputs = indexer_inputs(2, rows, keys, heads=3)
    index = [x.to(device).requires_grad_() for x in inputs]
    starts, ends = bounds(rows, keys, 5)
    starts[:, 3], ends[:, 3] = 9, 9
    position = torch.arange(keys)
    sees = (position >= starts[..., None]) & (position < ends[..., None])
    options = {"starts": starts.to(device), "ends": ends.to(device), "pool": pool, "backend": backend}
    found = dsa.lightning_indexer(*index, topk, **options)
    leaves = [x.detach().cpu().double().requires_grad_() for x in index]
    scores = oracle.index_scores(*leaves).masked_fill(~sees, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, 2), value=-torch.inf).unflatten(-1, (-1, pool)).amax(-1)
    best = scores.topk(topk).indices.sort(-1).values
    hidden = scores.gather(-1, best).isneginf()
    best = best.masked_fill(hidden, 99).sort(-1).values
    expected = scores.gather(-1, best.masked_fill(best == 99, 0)).masked_fill(best == 99, -torch.inf)
    assert found.topk_indices.dtype == torch.int32
    assert torch.equal(found.topk_indices.cpu(), best.masked_fill(best == 99, -1).int())
    seen = best != 99
    assert (~seen).any()
    assert (found.topk_scores.cpu()[~seen] == -torch.inf).all()
    oracle.assert_close(found.topk_scores.detach().cpu()[seen], expected[seen])
    factors = torch.randn(seen.shape, generator=torch.Generator().manual_seed(1)) * seen
    ours = torch.autograd.grad(found.topk_scores, index, factors.to(device))
    theirs = torch.autograd.grad(expected.where(seen, 0), leaves, factors.double())
    for mine, wanted in zip(ours, theirs, strict=True):
        oracle.assert_close(mine.cpu(), wanted, backward=True)
    with torch.no_grad():
        again = dsa.lightning_indexer(*index, topk, **options)
    assert torch.equal(again.topk_indices, found.topk_indices)
    oracle.assert_close(again.topk_scores.cpu()[seen], expected.detach()[seen])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pools_are_selected_by_their_best_key(backend):
    check_pools(backend)


def test_the_blocks_of_minimax_m3():
    """Four selections by four heads, each for a group of heads; the row's own block is always one."""
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    rows, block, heads, blocks = 37, 4, 4, 3
    sizes = {"index_head_dim": 8, "index_n_heads": heads, "index_block_size": block}
    sizes |= {"index_topk_blocks": blocks, "index_local_blocks": 1, "hidden_size": 12, "rms_norm_eps": 1e-6}
    torch.manual_seed(0)
    theirs = modeling.MiniMaxM3VLIndexer(SimpleNamespace(**sizes), 0)
    hidden, position = torch.randn(2, rows, 12), torch.arange(rows)
    still = torch.ones(1, rows, 8), torch.zeros(1, rows, 8)
    wanted = theirs(hidden, still, None, position[None].expand(2, -1))  # [2, heads, rows, blocks]
    with torch.no_grad():
        query = theirs.q_norm(theirs.q_proj(hidden).unflatten(-1, (heads, 8)))  # [2, rows, heads, 8]
        key = theirs.k_norm(theirs.k_proj(hidden))  # [2, rows, 8]
    query = query.transpose(1, 2).flatten(0, 1)[:, :, None]  # [2 * heads, rows, 1, 8]
    key = key.repeat_interleave(heads, dim=0)
    own = position // block
    options = {"pool": block, "use_relu": False, "ends": own * block}
    found = dsa.lightning_indexer(query, key, query.new_ones(2 * heads, rows, 1), blocks - 1, **options)
    chosen = torch.cat([found.topk_indices, own.int()[None, :, None].expand(2 * heads, -1, -1)], dim=-1)
    for mine, other in zip(chosen.flatten(0, 1).tolist(), wanted.flatten(0, 2).tolist(), strict=True):
        assert sorted(i for i in mine if i >= 0) == sorted(i for i in other if i >= 0)
    listed = dsa.keys_of_pools(chosen, block, rows)
    assert listed.amax(-1).tolist() == [position.tolist()] * 2 * heads


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: dsa.with_window(x, 0, 9), "window must be at least 1, got 0"),
        (lambda x: dsa.with_window(x.float(), 1, 9), "must be int32 or int64, got torch.float32"),
        (lambda x: dsa.with_window(x[0], 1, 9), r"must be \[batch, rows, topk\]"),
        (lambda x: dsa.with_window(x, 1, 10), "is ambiguous; pass ends"),
        (lambda x: dsa.keys_of_pools(x, 0, 9), "pool must be at least 1, got 0"),
        (
            lambda x: dsa.keys_of_pools(
                x, 4, 9, with_tail=True, starts=torch.full((9,), 2), ends=torch.full((9,), 5)
            ),
            "keys_of_pools: with a tail, starts must be multiples of pool = 4",
        ),
        (
            lambda x: dsa.keys_of_pools(x, 4, 9, with_tail=True, form=dsa.RowForm((6, 3))),
            "pad packed sequences to whole pools",
        ),
        (
            lambda x: dsa.lightning_indexer(*indexer_inputs(1, 9), 2, pool=0),
            "lightning_indexer: pool must be at least 1, got 0",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(1, 9, 2, dtype=torch.int64))
