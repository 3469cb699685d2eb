from __future__ import annotations

import pytest

from mindspeed_dsa.megatron.selections import Sharing

CASES = "tests.features.dsa.core_cases"


def test_mean_over_the_layers_that_have_an_indexer(pool):
    (rank,) = pool.run(f"{CASES}:track", 1, losses=[[(2, 1.0), (2, 3.0), (4, 6.0)]], num_layers=4, pp=1)
    # Two microbatches: layer 2 reports 1 + 3, layer 4 reports 6. (4 / 2 + 6 / 2) / 2 layers = 2.5.
    assert rank["totals"]["indexer loss"] == 2.5
    assert rank["written"] == [
        ("indexer loss", 2.5, 7),
        ("indexer loss/layer 2", 2.0, 7),
        ("indexer loss/layer 4", 3.0, 7),
    ]
    assert rank["after"] == {"values": 0, "reported": 0}


def test_mtp_layers_beyond_the_decoders(pool):
    (rank,) = pool.run(f"{CASES}:track", 1, losses=[[(1, 2.0), (3, 4.0)]], num_layers=2, pp=1)
    assert rank["totals"]["indexer loss"] == 1.5


def test_layers_that_share_selections_do_not_lower_the_mean(pool):
    # Frequency 4, offset 3, two stages of six layers: 1, 2, 3 compute on the first, 7 and 11 on the second.
    rule = Sharing(frequency=4, offset=3)
    stages = (range(1, 7), range(7, 13))
    losses = [[(layer, float(layer)) for layer in stage if rule.computes(layer)] for stage in stages]
    assert losses == [[(1, 1.0), (2, 2.0), (3, 3.0)], [(7, 7.0), (11, 11.0)]]
    twice = [[*stage, *stage] for stage in losses]  # two microbatches, each weighted by one half
    for rank in pool.run(f"{CASES}:track", 2, losses=twice, num_layers=12, pp=2):
        assert rank["totals"]["indexer loss"] == pytest.approx((1 + 2 + 3 + 7 + 11) / 5)
        by_layer = [name for name, _, _ in rank["written"][1:]]
        assert by_layer == [f"indexer loss/layer {layer}" for layer in (1, 2, 3, 7, 11)]


@pytest.mark.parametrize("silent", [0, 1])
def test_a_stage_without_dsa_layers_does_not_block_the_others(pool, silent):
    losses = [[(1, 2.0), (3, 4.0)], [(1, 2.0), (3, 4.0)]]
    losses[silent] = []
    ranks = pool.run(f"{CASES}:track", 2, losses=losses, num_layers=2, pp=2, timeout_s=60)
    for rank in ranks:
        assert rank["totals"]["indexer loss"] == 1.5
        assert len(rank["written"]) == 3


def test_nobody_reports(pool):
    ranks = pool.run(f"{CASES}:track", 2, losses=[[], []], num_layers=2, pp=2, timeout_s=60)
    assert all(rank == {"written": [], "totals": {}, "after": {}} for rank in ranks)


def test_data_parallel_ranks_average(pool):
    ranks = pool.run(f"{CASES}:track", 2, losses=[[(1, 2.0)], [(1, 6.0)]], num_layers=1, pp=1)
    assert [rank["totals"]["indexer loss"] for rank in ranks] == [2.0, 2.0]


def test_averaging_group(pool):
    assert pool.run(f"{CASES}:tracked_over_groups", 2) == [1.5, 1.5]


def test_the_tracker_lies_where_the_loss_is(pool):
    assert pool.run(f"{CASES}:track_on_another_device", 1) == ["meta"]
    without = pool.run(f"{CASES}:track_on_another_device", 1, switches={"no_dsa_repairs": "loss-tracker"})
    assert without == ["cpu"]
