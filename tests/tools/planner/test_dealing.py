"""Layers are dealt to stages as well as any split can, compared with all splits of small models."""

from __future__ import annotations

import itertools
import random

import pytest

from mindspeed_dsa.tools.planner.dealing import Dealing

SHAPES = [
    (2, 1, False),
    (4, 1, False),
    (2, 2, False),
    (3, 2, False),
    (2, 3, False),
    (2, 2, True),
    (3, 2, True),
]


def best_of_all(dealing: Dealing, most: list[int]) -> float | None:
    """Return the slowest stage's time of the best of all splits, or ``None`` if there is none."""
    layers, stages = len(dealing.layers), dealing.ranks * dealing.chunks
    found = []
    for ends in itertools.combinations(range(1, layers + dealing.lone_end), stages - 1):
        if dealing.begins and not all(dealing.begins[end] for end in ends):
            continue
        sizes = [end - begin for begin, end in itertools.pairwise((0, *ends, layers))]
        if any(size > limit for size, limit in zip(sizes, most, strict=True)):
            continue
        times = [sum(dealing.layers[begin:end]) for begin, end in itertools.pairwise((0, *ends, layers))]
        times[0] += dealing.first
        times[-1] += dealing.last
        found.append(max(times))
    return min(found, default=None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sharing", [False, True], ids=["any beginning", "some beginnings"])
def test_no_split_has_a_faster_slowest_stage(shape, sharing):
    ranks, chunks, v_shaped = shape
    noise = random.Random(str(shape))
    for _ in range(60):
        layers = [
            noise.choice([0.5, 1.0, 1.0, noise.random(), 4.0])
            for _ in range(noise.randint(ranks * chunks, 11))
        ]
        begins = [True, *(noise.random() < 0.7 for _ in layers[1:])] if sharing else []
        last = noise.choice([0.0, 3 * noise.random()])
        lone = not (begins or v_shaped)
        dealing = Dealing(layers, noise.random(), last, ranks, chunks, v_shaped, begins, lone)
        most = [noise.choice([2, 4, 11, 11]) for _ in range(ranks * chunks)]
        sizes, least = dealing.best(most), best_of_all(dealing, most)
        assert (sizes is None) == (least is None)
        if sizes is not None:
            assert (len(sizes), sum(sizes), min(sizes[:-1]) > 0) == (ranks * chunks, len(layers), True)
            assert all(size <= limit for size, limit in zip(sizes, most, strict=True))
            assert max(dealing.stages(sizes)) == pytest.approx(least)


def test_a_hot_layer_has_a_short_stage():
    layers = [1.0] * 12
    layers[4] = 4.0
    dealing = Dealing(layers, 0.0, 0.5, 4)
    assert max(dealing.stages([3, 3, 3, 3])) == 6.0
    assert max(dealing.stages(dealing.best() or ())) == 4.0


def test_equal_splits_are_evened():
    """Any of the other stages may take as long as the hot layer, but they share the rest."""
    assert Dealing([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0], 0.0, 0.0, 4).best() == (2, 2, 2, 1)


def test_embedding_and_end_are_counted():
    assert Dealing([1.0] * 6, 0.0, 0.0, 2).best() == (3, 3)
    assert Dealing([1.0] * 6, 0.0, 2.0, 2).best() == (4, 2)
    assert Dealing([1.0] * 6, 2.0, 0.0, 2).best() == (2, 4)


def test_a_stage_may_have_only_the_end_of_the_model():
    dealing = Dealing([1.0] * 6, 0.0, 5.0, 3, lone_end=True)
    assert dealing.stages((3, 3, 0)) == [3.0, 3.0, 5.0]
    assert dealing.best() == (3, 3, 0)
    assert Dealing([1.0] * 6, 0.0, 5.0, 3).best() in ((2, 3, 1), (3, 2, 1))


def test_ranks_have_stages_in_turn_or_in_a_v():
    sizes = (1, 2, 3, 4)
    assert Dealing([1.0] * 10, 0.0, 0.0, 2, 2).ranks_of(sizes) == [4.0, 6.0]
    assert Dealing([1.0] * 10, 0.0, 0.0, 2, 2, v_shaped=True).ranks_of(sizes) == [5.0, 5.0]
