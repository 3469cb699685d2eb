"""Optimizer state on the host; see also ``test_optimizer_features.py``."""

from __future__ import annotations

import pytest
import torch

from tests.support.optimizer_training import (
    DISTRIBUTED,
    OFF,
    OVERLAP,
    PLAIN,
    assert_same_training,
)

ON = {"swap_optimizer": True}
SWAPPED = {"voided": True, "moments on the host": 1, "optimizers": 1}
# The model's own fp32 weights are the masters.
KEPT = {"voided": False, "moments on the host": 1, "optimizers": 1}
# Megatron makes more than one bucket only with overlapped gradient reduction.
BUCKETS = {**DISTRIBUTED, "ddp_options": {"overlap_grad_reduce": True}}
CASES = "tests.features.memory.swap_optimizer.steps_on_host"


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {"skip": None}, id="plain", marks=pytest.mark.full),  # Megatron skips no step here
        pytest.param(2, {"skip": 2, **DISTRIBUTED}, id="distributed"),
    ],
)
def test_a_float32_models_moments_move_alone(pool, ranks, options):
    for run in assert_same_training(pool, ranks, ON, steps=5, precision="fp32", **options):
        assert run["placed"] == KEPT


@pytest.mark.full
def test_experts_with_an_optimizer_of_their_own(pool):
    for run in assert_same_training(pool, 2, ON, steps=4, skip=2, clip=0.5, ep=2, **DISTRIBUTED):
        assert run["placed"] == {**SWAPPED, "optimizers": 2}


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "options"), [(1, PLAIN), (2, DISTRIBUTED)], ids=["plain", "distributed"])
def test_fp16(pool, ranks, options):
    for run in assert_same_training(pool, ranks, ON, steps=5, skip=2, precision="fp16", **options):
        assert run["placed"] == SWAPPED


@pytest.mark.full
@pytest.mark.parametrize("times", [1, 1000])
def test_any_number_of_parts_makes_the_same_training(pool, times):
    switches = {**ON, "swap_optimizer_times": times}
    assert_same_training(pool, 1, switches, steps=3, clip=0.0, **DISTRIBUTED)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, PLAIN, id="plain"),
        pytest.param(2, BUCKETS, id="distributed"),
        pytest.param(2, OVERLAP, id="overlap"),
        pytest.param(2, {**BUCKETS, "ep": 2}, id="experts"),
    ],
)
def test_loading_and_gathering_begin_early_on_devices_that_copy_beside_other_work(pool, ranks, options):
    early = pool.run(f"{CASES}:order_of_events", ranks, early=True, **options)
    late = pool.run(f"{CASES}:order_of_events", ranks, early=False, **options)
    for inert, order in zip(late, early, strict=True):
        assert order["parts"] > 16, "parameters are split"
        # Megatron's unsharded optimizer does not know the gradient buckets.
        sharded = "distributed" in options
        assert (order["first load"], inert["first load"]) == ("backward" if sharded else "step", "step")
        gathers = sharded and "overlap" not in options
        assert (order["gathered before the last update"] > 0) == gathers
        if "ep" not in options:  # Megatron gathers all buckets of a model again for each of its optimizers
            assert inert["gathered before the last update"] == 0
            assert order["gathered"] == inert["gathered"], "no bucket twice"
        assert all((before > 0) == sharded and after == 0 for before, after in order["staging"])
        assert all(pair == (0, 0) for pair in inert["staging"])
        for what in ("weights", "masters", "moments"):
            assert order[what] == inert[what]


def test_what_is_loaded_is_dropped_when_weights_are_set_from_outside(pool):
    (early,) = pool.run(f"{CASES}:changed_while_loaded", 1, early=True)
    (late,) = pool.run(f"{CASES}:changed_while_loaded", 1, early=False)
    assert (early.pop("loaded"), late.pop("loaded")) == (True, False)
    assert early == late


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.full)])
def test_state_that_verl_has_moved_is_taken_back(pool, early):
    moved, kept = (
        pool.run(f"{CASES}:offloaded_by_verl", 1, offloads=on, early=early) for on in (True, False)
    )
    assert moved == kept


def test_after_a_step_that_fails_in_the_middle_only_loading_helps(pool):
    (result,) = pool.run(f"{CASES}:torn", 1)
    first, *refused = result.pop("refused")
    assert first.startswith("ZeroDivisionError")
    assert len(refused) == 2, "a step, and what a checkpoint is made of"
    assert all(each.startswith("RuntimeError: swap-optimizer: a step of this") for each in refused)
    assert result["record"]["successful"]


@pytest.mark.full
def test_an_early_load_without_memory_is_made_later(pool):
    (expected,) = pool.run(f"{CASES}:loading_fails", 1, error=None, **DISTRIBUTED)
    assert pool.run(f"{CASES}:loading_fails", 1, error=torch.OutOfMemoryError, **DISTRIBUTED) == [expected]
    (other,) = pool.run(f"{CASES}:loading_fails", 1, error=ZeroDivisionError, **DISTRIBUTED)
    assert (expected["raised"], other["raised"]) == ("", "ZeroDivisionError")


def test_a_model_that_outlives_its_optimizer_keeps_nothing_of_it(pool):
    (found,) = pool.run(f"{CASES}:second_optimizer", 1, **DISTRIBUTED)
    assert found["next"] == found["one"] > 0


@pytest.mark.full
@pytest.mark.parametrize("times", [16, pytest.param(4, marks=pytest.mark.full)])
def test_peak_of_a_step_over_rest(pool, times):
    (peaks,) = pool.run(f"{CASES}:peaks", 1, switches={**ON, "swap_optimizer_times": times})
    (off,) = pool.run(f"{CASES}:peaks", 1, switches=OFF)
    print(f"peaks in bytes per parameter, with and without: {peaks} {off}")
    for step in ("first", "second"):
        assert 24 / times < peaks[step] <= 36 / times, step
    assert peaks["construction"] <= 6 * peaks["largest"] + 0.1, "one master weight at a time"
    assert peaks["load"] < 0.1, "moments are read into their places"
    assert off["load"] >= 8
    assert off["construction"] >= 4, "master weights"
    assert off["first"] >= 8, "moments"
