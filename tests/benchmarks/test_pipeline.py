"""Figures of pipeline schedules: simulated ones, and the conversion of times into ratios."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.moe.problem import Timing
from benchmarks.pipeline import CELLS, dualpipev, loads, recompute, recomputed_pairs, run, split
from benchmarks.pipeline.pairs import metrics
from benchmarks.pipeline.simulated import run as simulated
from tests.tools.planner.recorded_loads import hot


@pytest.fixture(scope="module")
def cell():
    """Return all simulated figures."""
    return simulated()


def test_simulated_pairs(cell):
    result = cell["simulated"]
    sixteen = result["PP16 x VPP2, 64 microbatches"]
    assert sixteen["step_time"] == {
        "without all-to-all": 429,
        "stock": 643.5,
        "pairs": 571.5,
        "pairs, +1 warmup": 477,
        "pairs, +1 warmup, half hidden alone": 453,
    }
    worst = sixteen["steady_a2a_hidden_worst_rank"]
    assert worst == {"pairs": pytest.approx(0.43, abs=0.005), "pairs, +1 warmup": 1}
    one = result["PP1, 4 microbatches"]
    assert (sixteen["extra_chunks_in_flight"], sixteen["extra_microbatches_in_flight"]) == (1, 0.5)
    assert (one["extra_chunks_in_flight"], one["extra_microbatches_in_flight"]) == (1, 1)


def test_simulated_recompute(cell):
    found = cell["simulated_recompute"]
    assert {each["recompute_in_bubble_removed"] for each in found.values()} == {1.0}
    assert found["PP4, 8 microbatches"]["step_time"] == {"recompute": 44, "recompute in bubbles": 41}


def test_ratios_of_measured_steps():
    """Warmup and cooldown without steady state are a step with one microbatch."""
    steps = {"stock": 1000, "pairs": 800, "overlap in one microbatch": 900, "no transfers": 750}
    steps |= {
        "stock, one microbatch": 250,
        "pairs, one microbatch": 220,
        "no transfers, one microbatch": 200,
    }
    times = {name: Timing(value / 1e3, 0.1, value / 1e3) for name, value in steps.items()}
    result = metrics({"times": times, "deviation": 0.0})
    assert result["fb_overlap_speedup"] == pytest.approx(1.25)
    assert result["moe_overlap_speedup"] == pytest.approx(1000 / 900)
    assert result["fb_over_moe_overlap"] == pytest.approx(900 / 800)
    assert result["a2a_hidden_fraction"] == pytest.approx(0.8)
    assert result["edge_a2a_hidden"] == pytest.approx(0.6)


def test_ratios_of_recomputed_steps():
    steps = {"stock": 1200, "pairs": 1000, "no transfers": 950}
    popular = {"stock": 1500, "pairs": 1250, "pairs, balanced": 1000}
    even, skewed = (
        {
            "times": {name: Timing(value / 1e3, 0.1, value / 1e3) for name, value in milliseconds.items()},
            "deviation": 0.0,
            "experts_moved": [1],
        }
        for milliseconds in (steps, popular)
    )
    result = recomputed_pairs.metrics(even, skewed)
    assert result["stack_speedup"] == pytest.approx(1.5)
    assert result["stack"]["speedup_without_balance"] == pytest.approx(1.2)
    assert result["recomputed_fb_overlap_speedup"] == pytest.approx(1.2)
    assert result["recomputed_pairs"]["a2a_hidden_fraction"] == pytest.approx(0.8)
    assert result["recomputed_pairs"]["exposed_over_step"] == pytest.approx(0.25 * 1000 / 1200)


def test_what_bubbles_remove():
    """One of the three ranks waits for no gradient and recomputes nothing ahead."""
    times = {"plain": Timing(1.0, 0.5, 1.1), "bubble": Timing(0.9, 0.5, 0.95)}
    ranks = [{"times": times, "again": again, "deviation": 0.0} for again in (0.1, 0.1, None)]
    result = recompute.metrics(ranks)
    assert result["recompute_in_bubble_removed"] == pytest.approx(0.15 / (2 * 0.1))
    assert result["recompute_in_bubble_removed_least"] == pytest.approx(0.1 / (2 * 0.1))
    assert result["step_ratio"] == pytest.approx(0.95 / 1.1)
    assert "caution" not in result
    assert recompute.metrics(ranks, "shared")["caution"] == "shared"


def test_cells_are_named():
    with pytest.raises(ValueError, match=f"pipeline has no cell pair; use {', '.join(CELLS)}"):
        run("cpu", only="pair")


def test_ratios_of_split_steps():
    times = {"whole": Timing(1.0, 0.1, 1.2), "split": Timing(0.9, 0.1, 1.0)}
    ranks = [{"times": times, "deviation": 0.0, "weights": each, "waiting": 8} for each in (0.04, 0.06)]
    result = split.metrics(ranks, split.simulated_ratio(2, 1, 4))
    assert result["split_backward_removed"] == pytest.approx(0.2 / (2 * 0.05))
    assert (result["step_ratio"], result["step_ratio_least"]) == (pytest.approx(1 / 1.2), pytest.approx(0.9))
    assert result["step_ratio_simulated"] == pytest.approx(13 / 15)


def test_ratios_of_schedules_in_turns():
    """Simulated with a stock step's share of all-to-alls: a third, as on the page of schedules."""
    place = dataclasses.replace(dualpipev.places(64)["PP2 x EP2"], ranks=4)
    steps = {"1F1B": 1.2, "interleaved": 1.5, "interleaved, pairs": 1.1, "DualPipeV, pairs": 1.21}
    times = {name: Timing(value, 0.1, value) for name, value in {**steps, "no transfers": 1.0}.items()}
    result = dualpipev.metrics(
        place, 16, {"times": times, "deviation": 0.0}, {"1F1B": [(0.1, 0.1), (0.2, 0.1)]}
    )
    assert result["dualpipe_over_interleaved"] == pytest.approx(1.1)
    simulated = result["step_over_stock_simulated"]
    assert simulated["interleaved, pairs"] == pytest.approx(117 / 157.5)
    assert result["dualpipe_over_interleaved_simulated"] == pytest.approx(125 / 117)
    assert result["step_over_stock"]["no transfers"] == pytest.approx(1 / 1.5)
    compared = result["bubbles"]["1F1B"]
    assert compared["recorded_over_simulated"] == pytest.approx(1.5)
    assert not compared["is_within_bound"]


def test_steps_of_layouts_beside_their_plans():
    found = {
        "seconds": {"today": [2.2, 2.0, 2.1], "dealt": [1.1, 1.0, 1.05]},
        "processor_share": 0.1,
        "losses_are_equal": True,
        "deviation": 0.0,
    }
    result = loads.metrics(found, {"today": 2.0, "dealt": 1.0})
    assert result["speedup"] == pytest.approx(2.0)
    assert result["measured_over_planned"] == {"today": pytest.approx(1.05), "dealt": pytest.approx(1.05)}
    assert result["is_within_bound"]
    assert not loads.metrics(found, {"today": 2.0, "dealt": 0.9})["is_within_bound"]


def test_sleeping_devices_are_planned_by_their_products(tmp_path):
    """A layer with balanced experts takes the given time, beside its router's small product."""
    sizes = loads.Sizes()
    dealt = loads.planned(sizes, hot(tmp_path))
    assert dealt.dealing.layers[0] == pytest.approx(sizes.seconds, rel=0.01)
    # Experts have 0.857 of the FLOPs: 3 x 64 x 512 of them beside 4 x 64 x 64.
    assert dealt.dealing.layers[4] == pytest.approx((0.143 + 4 * 0.857) * sizes.seconds, rel=0.01)
    assert dealt.after.time.total < dealt.before.time.total
