"""Tiles of keys that neighbouring rows share: all are found, no entry is lost, and their sums are right.

The kernel that multiplies the tiles runs on Hopper only. Here its dataflow is followed in fp64, tile by tile,
from the real ordering kernels' output to the key gradients, and compared with their formula.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ops.random_inputs import drifting_indices, random_indices
from tests.ops.triton_backend import DEVICE, shared_tiles

FELLOWS, TILE = shared_tiles.FELLOWS, shared_tiles.TILE


def ordered(indices, keys=400, chunk=8):
    """Share tiles among ``[batch, rows, topk]`` indices; return flat indices, row lengths and tiles."""
    batch, rows, topk = indices.shape
    flat = indices.reshape(batch * rows, topk).to(DEVICE)
    position = torch.arange(1, topk + 1, device=DEVICE)
    # A row's length ends with its last valid entry.
    lengths = torch.where((flat >= 0) & (flat < keys), position, 0).amax(1).int()
    tiles = shared_tiles.share_tiles(flat, lengths, 0, rows, keys, chunk)
    return flat, lengths, tiles


def listed(tiles, lengths, chunk=8):
    """Return all tiles: first row, first entry, and number of rows that share the tile."""
    topk = tiles.indices.shape[1]
    tasks, bounds = shared_tiles.tasks_of(tiles.ends, lengths, topk, chunk)
    bounds = bounds[:, :2]
    in_row = -(-topk // TILE)
    # Parts follow each other without gaps.
    assert bounds[:-1, 1].tolist() == bounds[1:, 0].tolist()
    return [
        # A task packs row, tile of the row, and number of sharers: ((row * tiles) + tile) * 8 + sharers.
        (part * chunk + task // 8 // in_row, task // 8 % in_row * TILE, task % 8)
        for part, (first, last) in enumerate(bounds.tolist())
        for task in tasks[first:last].tolist()
    ]


@pytest.mark.parametrize("topk", [64, 200, 256])
@pytest.mark.parametrize(
    ("rows", "chunk"),
    [(8, 16), (13, 4), (13, 2), (80, 64), pytest.param(80, 128, marks=pytest.mark.full), (2, 1)],
)
def test_rows_keep_their_entries_and_each_is_in_one_tile(rows, chunk, topk):
    indices = drifting_indices(2, rows, 400, topk)
    flat, lengths, tiles = ordered(indices, chunk=chunk)
    assert chunk == shared_tiles.whole_chunk(chunk)
    # Entries are permuted within their row, and none is lost.
    assert torch.equal(flat.gather(1, tiles.places.long()), tiles.indices)
    expected = torch.arange(topk, device=DEVICE).expand_as(flat)
    assert torch.equal(tiles.places.sort(1).values.long(), expected)
    taken = torch.zeros_like(flat)
    for row, entry, sharers in listed(tiles, lengths, chunk):
        taken[row : row + sharers, entry : entry + TILE] += 1
        of_rows = tiles.indices[row : row + sharers, entry : entry + TILE]
        assert (of_rows == of_rows[0]).all()
        assert row // rows == (row + sharers - 1) // rows, "a tile of two sequences"
        assert row // chunk == (row + sharers - 1) // chunk, "a tile of two chunks"
    is_key = torch.arange(topk, device=DEVICE) < lengths[:, None]
    # Every valid entry is in exactly one tile.
    assert taken.max() == 1
    assert taken[is_key].min() == 1


def test_what_neighbours_have_in_common_is_found():
    """All full tiles in common are found: first among four rows, then between two."""
    indices = drifting_indices(1, 16, 400, 256, drift=0.4)
    flat, _, tiles = ordered(indices)
    sets = [set(row[row >= 0].tolist()) for row in flat]
    some = 0
    for first in range(0, 16, FELLOWS):
        by_four = set.intersection(*sets[first : first + FELLOWS])
        # Only full tiles are shared.
        four = len(by_four) // TILE * TILE
        assert tiles.ends[first : first + FELLOWS, 0].tolist() == [four] * FELLOWS
        for row in (first, first + 2):
            # Pairs share the keys that are left after the tiles of all four rows.
            two = four + (len(sets[row] & sets[row + 1]) - four) // TILE * TILE
            assert tiles.ends[row : row + 2, 1].tolist() == [two] * 2
            some += four > 0 and two > four
    assert some > 0


def rows_apart(indices):
    # Every second row is empty.
    indices[:, 1::2] = -1


def descending(indices):
    indices[:] = indices.flip(-1)


def with_gaps(indices):
    # In row 0 of every group of four rows, which then shares nothing.
    indices[:, ::4, 5] = -1


def beyond_the_keys(indices):
    indices[:, ::4, 5] = 400


def twice(indices):
    indices[:, ::4, 5] = indices[:, ::4, 6]


@pytest.mark.parametrize("spoil", [rows_apart, descending, with_gaps, beyond_the_keys, twice])
# Sharing needs ascending rows of distinct valid keys.
def test_other_rows_share_nothing_and_lose_nothing(spoil):
    indices = drifting_indices(1, 8, 400, 128)
    spoil(indices)
    flat, lengths, tiles = ordered(indices)
    assert (tiles.ends == 0).all()
    assert torch.equal(tiles.indices, flat)
    assert all(sharers == 1 for _, _, sharers in listed(tiles, lengths))


def gradients_of_keys(query, key_value, indices, grad_out, value_dim):
    """Return key gradients by the formula and by tiles, fp64, ``[batch * keys, dim]`` each."""
    batch, rows, heads, _ = query.shape
    keys = key_value.shape[1]
    flat, lengths, tiles = ordered(indices, keys=keys)
    topk = flat.shape[1]
    key_value = key_value.clone().requires_grad_()
    keys_at = indices.clamp_min(0).long()
    gathered = key_value[torch.arange(batch)[:, None, None], keys_at]
    scores = torch.einsum("bshd,bskd->bshk", query, gathered) * 0.1
    scores = scores.masked_fill((indices < 0)[:, :, None], -torch.inf)
    probabilities = scores.softmax(-1)
    out = torch.einsum("bshk,bskd->bshd", probabilities, gathered[..., :value_dim])
    (expected,) = torch.autograd.grad(out, key_value, grad_out)

    delta = (out * grad_out).sum(-1).detach().view(batch * rows, heads)
    lse = scores.logsumexp(-1).detach().view(batch * rows, heads)
    query, grad_out = query.view(batch * rows, heads, -1), grad_out.view(batch * rows, heads, -1)
    total = torch.zeros(batch * keys, query.shape[-1], dtype=torch.float64)
    stored = torch.zeros(batch * rows, topk, query.shape[-1], dtype=torch.float64)
    # Entries whose sums another row's task adds.
    others = shared_tiles.added_by_others(tiles.ends, topk).cpu()
    for row, entry, sharers in listed(tiles, lengths):
        index = tiles.indices[row, entry : entry + TILE].cpu().long()
        tile = key_value.detach()[row // rows, index.clamp_min(0)]
        sums = torch.zeros(len(index), query.shape[-1], dtype=torch.float64)
        for sharer in range(row, row + sharers):
            # Softmax recomputed from lse; rows of invalid keys are zero.
            probability = (query[sharer] @ tile.T * 0.1 - lse[sharer, :, None]).exp() * (index >= 0)
            inner = grad_out[sharer] @ tile[:, :value_dim].T
            grad_scores = probability * (inner - delta[sharer, :, None]) * 0.1
            sums += grad_scores.T @ query[sharer]
            sums[:, :value_dim] += probability.T @ grad_out[sharer]
        valid = index >= 0
        # First way: add every tile to its keys at once.
        total.index_add_(0, row // rows * keys + index[valid], sums[valid])
        assert not others[row, entry : entry + TILE].any()
        assert others[row + 1 : row + sharers, entry : entry + TILE].all()
        # Second way: store every tile's sums at its entries, and add them by entry afterwards.
        stored[row, entry : entry + TILE][valid] = sums[valid]
    ids = torch.where((tiles.indices.cpu() >= 0) & ~others, tiles.indices.cpu(), -1).long()
    # Invalid entries go to one extra key, which is dropped at the end.
    ids = torch.where(ids >= 0, ids + (torch.arange(batch * rows) // rows * keys)[:, None], batch * keys)
    by_entry = torch.zeros(batch * keys + 1, query.shape[-1], dtype=torch.float64)
    by_entry.index_add_(0, ids.flatten(), stored.flatten(0, 1))
    shared = sum(sharers > 1 for _, _, sharers in listed(tiles, lengths))
    return expected.flatten(0, 1), total, by_entry[:-1], shared


def trained_indices():
    """Return recorded selections of two sequences, 256 of up to 1024 keys per row."""
    # From one layer of the example's model after 60 steps on text; the first rows and some later ones.
    return load_file(Path(__file__).with_name("trained_selections.safetensors"))["indices"].int()


@pytest.mark.parametrize("kind", ["drifting", "random", "trained"])
def test_the_sums_over_tiles_are_the_gradients_of_keys(kind):
    generator = torch.Generator().manual_seed(2)
    batch, rows, keys, heads, dim, value_dim, topk = 2, 10, 300, 3, 24, 16, 140
    if kind == "drifting":
        indices = drifting_indices(batch, rows, keys, topk)
    elif kind == "random":
        indices = random_indices(batch, rows, keys, topk)
    else:
        indices, keys = trained_indices(), 1024
        batch, rows, topk = indices.shape
    query, key_value, grad_out = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((batch, rows, heads, dim), (batch, keys, dim), (batch, rows, heads, value_dim))
    )
    expected, *both_ways, shared = gradients_of_keys(query, key_value, indices, grad_out, value_dim)
    # Random selections have no complete tile in common.
    assert (shared > 0) == (kind != "random")
    for sums in both_ways:
        torch.testing.assert_close(sums, expected, rtol=1e-10, atol=1e-12)
