"""Choice of the layers of a pipeline stage in which a feature is active."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.features.memory.chosen_layers import LayerOptions, check_layers, chosen


def test_layers_are_spread_over_chunks():
    """Layers are chosen across chunks in turn: layer 0 of both chunks, then layer 1 of both."""
    assert [chosen([3, 3], chunk, 3) for chunk in (0, 1)] == [[0, 1], [0]]
    assert [chosen([3, 3], chunk, None) for chunk in (0, 1)] == [[0, 1, 2], [0, 1, 2]]
    assert [chosen([3, 3], chunk, 0) for chunk in (0, 1)] == [[], []]


def test_layers_recomputed_in_full_do_not_count():
    assert [chosen([3, 3], chunk, 3, in_full=1) for chunk in (0, 1)] == [[1, 2], [1]]
    assert chosen([2], 0, None, in_full=2) == []


def test_models_whose_layers_are_not_chosen_are_refused():
    args = SimpleNamespace(hybrid_override_pattern="M*M*")
    (problem,) = check_layers(args, LayerOptions(True, None), "--swap-attention")
    assert "not in those of --hybrid-override-pattern; omit one" in problem
    assert not list(check_layers(args, LayerOptions(False, None), "--swap-attention"))


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 30), st.integers(0, 7))
def test_as_many_layers_as_asked_for_and_evenly(layers, wanted, in_full):
    by_chunk = [chosen(layers, chunk, wanted, in_full) for chunk in range(len(layers))]
    left = [max(count - in_full, 0) for count in layers]
    assert sum(map(len, by_chunk)) == min(wanted, sum(left))
    for positions, count in zip(by_chunk, left, strict=True):
        assert positions == list(range(in_full, in_full + len(positions)))
        # No chunk has two layers more than another chunk with layers left.
        assert all(
            len(positions) <= len(other) + 1 or len(other) == room
            for other, room in zip(by_chunk, left, strict=True)
        )
        assert len(positions) <= count
