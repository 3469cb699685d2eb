"""Drawn selections: only visible keys, of which neighbours share the requested part."""

from __future__ import annotations

import pytest
import torch

from benchmarks.dsa.selections import draw, shared_with

ROWS, TOPK = 1536, 96  # more rows than are drawn at a time


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("wanted", [0.5, 0.8, 0.95])
def test_neighbours_share_what_is_wanted(wanted, full):
    found = shared_with(draw(ROWS, TOPK, shared=wanted, full=full)[0])
    behind = found[2 * TOPK :]
    assert behind.mean() == pytest.approx(wanted, abs=0.01)
    assert behind[-200:].mean() == pytest.approx(wanted, abs=0.02)
    assert behind[:200].mean() == pytest.approx(wanted, abs=0.02)


def test_rows_by_themselves_share_what_chance_gives():
    found = shared_with(draw(ROWS, TOPK)[0])
    chance = TOPK / torch.arange(2 * TOPK, ROWS)
    assert found[2 * TOPK - 1 :].mean() == pytest.approx(float(chance.mean()), abs=0.01)
    # Less is not possible.
    few = shared_with(draw(ROWS, TOPK, shared=0.01, full=True)[0])
    assert few.mean() == pytest.approx(TOPK / ROWS, abs=0.005)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shared", [None, 0.8])
def test_rows_choose_among_the_keys_that_they_see(shared, full):
    ordered, random = (
        draw(ROWS, TOPK, shared=shared, full=full, ascending=ascending) for ascending in (True, False)
    )
    for number, (one, other) in enumerate(zip(ordered[0].tolist(), random[0].tolist(), strict=True)):
        count = TOPK if full else min(number + 1, TOPK)
        assert one[:count] == sorted(set(one[:count]))
        assert one[0] >= 0
        assert one[count - 1] <= (ROWS - 1 if full else number)
        assert one[count:] == other[count:] == [-1] * (TOPK - count)
        assert sorted(other) == sorted(one)
    late = random[0, -1]
    assert not torch.equal(late, late.sort().values)
    assert ordered.dtype == torch.int32
    assert ordered.shape == (1, ROWS, TOPK)


def test_what_is_shared_is_counted():
    indices = torch.tensor([[0, -1, -1], [1, 0, -1], [0, 2, 1], [5, 4, 3]])
    assert shared_with(indices).tolist() == [1, 1, 0]
    assert shared_with(indices, 2).tolist() == [1, 0]


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="cannot share 1 of their keys: give a fraction"):
        draw(8, 2, shared=1)
    with pytest.raises(ValueError, match="9 of 8 keys cannot be chosen"):
        draw(8, 9)
