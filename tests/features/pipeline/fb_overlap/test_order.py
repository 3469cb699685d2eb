"""Computation during each transfer, seen by modules and weights, and memory that stays alive."""

from __future__ import annotations

import pytest

from tests.features.moe.balanced_experts.popular_experts import ALWAYS

CASES = "tests.features.pipeline.fb_overlap.paired_steps"
FIRST_FORWARD = [
    # Dispatch of tokens and of probabilities.
    *("attention", "launch", "launch", "shared fc1", "wait", "wait"),
    *("experts", "launch", "shared fc2", "wait"),  # combine
]
PAIR = [
    # Reversed combine.
    *("launch", "attention", "launch", "launch", "shared fc2 dW", "shared fc1 dW", "wait"),
    *("launch", "launch", "experts dW"),  # reversed dispatch
    *("shared fc1", "wait", "wait", "experts", "launch", "shared fc2"),
    *("wait", "wait", "attention dW", "wait"),
]
LAST_BACKWARD = [
    *("launch", "shared fc2 dW", "shared fc1 dW", "wait"),
    *("launch", "launch", "experts dW", "wait", "wait", "attention dW"),
]


AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
MOVING = {**ALWAYS, "balanced_moe_hot_expert_num": 2}
FORWARD_AGAIN = ["shared fc1", "wait", "wait", "experts", "shared fc2"]  # without a combine
RECOMPUTED_PAIR = [
    *("launch", "attention", "launch", "launch"),  # reversed combine, and the repeated dispatch
    *("attention", "launch", "launch", *FORWARD_AGAIN),
    *("shared fc2 dW", "shared fc1 dW", "wait", "launch", "launch", "experts dW"),  # reversed dispatch
    *("shared fc1", "wait", "wait", "experts", "launch", "shared fc2"),
    *("wait", "wait", "attention dW", "wait"),
]
RECOMPUTED_BACKWARD = [
    *("launch", "attention", "launch", "launch", *FORWARD_AGAIN),
    *("shared fc2 dW", "shared fc1 dW", "wait"),
    *("launch", "launch", "experts dW", "wait", "wait", "attention dW"),
]


def without_shared(events):
    return [event for event in events if "shared" not in event]


def test_one_direction_runs_under_the_others_transfers(pool):
    for events in pool.run(f"{CASES}:order", 2):
        assert events == [*FIRST_FORWARD, *PAIR, *LAST_BACKWARD]


def test_without_a_shared_expert(pool):
    for events in pool.run(f"{CASES}:order", 2, moe_shared_expert_intermediate_size=None):
        assert events == without_shared([*FIRST_FORWARD, *PAIR, *LAST_BACKWARD])


def test_what_is_recomputed_runs_under_transfers_too(pool):
    """Both microbatches share one layer, whose dispatcher keeps separate state for one of them."""
    for events in pool.run(f"{CASES}:order", 2, **AGAIN):
        assert events == [*FIRST_FORWARD, *RECOMPUTED_PAIR, *RECOMPUTED_BACKWARD]


def test_graphs_die_with_their_backward(pool):
    """Graphs are freed by reference counting; for any number of microbatches, two are in flight."""
    few, many = (pool.run(f"{CASES}:buffers_alive", 2, microbatches=count) for count in (3, 6))
    assert few == many
    assert all(rank["left"] == 0 and rank["most"] >= 4 for rank in few)


@pytest.mark.full
@pytest.mark.parametrize("recomputed", [AGAIN, EXPERTS], ids=["layers", "experts"])
@pytest.mark.parametrize("moving", [{}, MOVING], ids=["", "hot experts"])
def test_graphs_die_where_they_are_computed_twice(pool, recomputed, moving):
    few, many = (
        pool.run(f"{CASES}:buffers_alive", 2, microbatches=count, switches=moving, recomputed=recomputed)
        for count in (3, 6)
    )
    assert few == many
    assert all(rank["left"] == 0 for rank in few)


@pytest.mark.full
def test_graphs_die_in_a_pipeline(pool):
    ranks = pool.run(f"{CASES}:buffers_alive", 4, microbatches=4, layers=4, pp=2, vpp=2)
    assert all(rank["left"] == 0 and rank["most"] >= 4 for rank in ranks)
