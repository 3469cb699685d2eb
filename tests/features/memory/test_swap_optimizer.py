from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.memory.swap_optimizer import FEATURE, problems
from tests.features.memory.training import (
    DISTRIBUTED,
    JOB,
    OFF,
    OVERLAP,
    PLAIN,
    assert_same_training,
    assert_skipped,
    layouts,
    saved_at_rest,
)

ON = {"swap_optimizer": True}
SWAPPED = {"voided": True, "moments on the host": 1, "optimizers": 1}
KEPT = {"voided": False, "moments on the host": 1, "optimizers": 1}  # the model's own float32 weights
# Megatron has more than one bucket only if their gradients are reduced one by one.
BUCKETS = {**DISTRIBUTED, "ddp_options": {"overlap_grad_reduce": True}}
CASES = "tests.features.memory.swap_optimizer_cases"


@pytest.mark.parametrize(("ranks", "options"), list(layouts(["dp2, distributed, overlap"])))
def test_ten_steps_are_the_same_bits_with_a_skipped_step_in_the_middle(pool, ranks, options):
    for run in assert_same_training(pool, ranks, ON, skip=5, clip=0.5, **options):
        assert_skipped(run, 5)
        assert run["placed"] == SWAPPED


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {"skip": None}, id="plain", marks=pytest.mark.full),  # skips no step in Megatron
        pytest.param(2, {"skip": 2, **DISTRIBUTED}, id="distributed"),
    ],
)
def test_a_float32_models_moments_move_alone(pool, ranks, options):
    for run in assert_same_training(pool, ranks, ON, steps=5, precision="fp32", **options):
        assert run["placed"] == KEPT


def test_experts_with_an_optimizer_of_their_own(pool):
    for run in assert_same_training(pool, 2, ON, steps=4, skip=2, clip=0.5, ep=2, **DISTRIBUTED):
        assert run["placed"] == {**SWAPPED, "optimizers": 2}


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "options"), [(1, PLAIN), (2, DISTRIBUTED)], ids=["plain", "distributed"])
def test_fp16(pool, ranks, options):
    for run in assert_same_training(pool, ranks, ON, steps=5, skip=2, precision="fp16", **options):
        assert run["placed"] == SWAPPED


@pytest.mark.parametrize("times", [1, pytest.param(1000, marks=pytest.mark.full)])
def test_any_number_of_parts_makes_the_same_training(pool, times):
    switches = {**ON, "swap_optimizer_times": times}
    assert_same_training(pool, 1, switches, steps=3, clip=0.0, **DISTRIBUTED)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, PLAIN, id="plain"),
        pytest.param(2, BUCKETS, id="distributed"),
        pytest.param(2, OVERLAP, id="overlap", marks=pytest.mark.full),
        pytest.param(2, {**BUCKETS, "ep": 2}, id="experts", marks=pytest.mark.full),
    ],
)
def test_loading_and_gathering_begin_early_on_devices_that_copy_beside_other_work(pool, ranks, options):
    early = pool.run(f"{CASES}:order_of_events", ranks, early=True, **options)
    late = pool.run(f"{CASES}:order_of_events", ranks, early=False, **options)
    for inert, found in zip(late, early, strict=True):
        assert found["parts"] > 16, "parameters are split"
        # Megatron's optimizer without sharding does not know the buckets of gradients.
        sharded = "distributed" in options
        assert (found["first load"], inert["first load"]) == ("backward" if sharded else "step", "step")
        gathers = sharded and "overlap" not in options
        assert (found["gathered before the last update"] > 0) == gathers
        if "ep" not in options:  # Megatron gathers all buckets of a model again for each of its optimizers
            assert inert["gathered before the last update"] == 0
            assert found["gathered"] == inert["gathered"], "no bucket twice"
        assert all((before > 0) == sharded and after == 0 for before, after in found["staging"])
        assert all(pair == (0, 0) for pair in inert["staging"])
        for what in ("weights", "masters", "moments"):
            assert found[what] == inert[what]


def test_what_is_loaded_is_dropped_when_weights_are_set_from_outside(pool):
    (early,) = pool.run(f"{CASES}:changed_while_loaded", 1, early=True)
    (late,) = pool.run(f"{CASES}:changed_while_loaded", 1, early=False)
    assert (early.pop("loaded"), late.pop("loaded")) == (True, False)
    assert early == late


@pytest.mark.parametrize(("ranks", "options"), [(1, PLAIN), (2, DISTRIBUTED)], ids=["plain", "distributed"])
def test_a_step_that_fails_leaves_everything(pool, ranks, options):
    for result in pool.run(f"{JOB}:fail_in_the_step", ranks, switches=ON, **options):
        assert result == {"error": "out of luck", "shard is as before": True, "placed": SWAPPED}


def test_after_a_step_that_fails_in_the_middle_only_loading_helps(pool):
    (found,) = pool.run(f"{CASES}:torn", 1)
    first, *refused = found.pop("refused")
    assert first.startswith("ZeroDivisionError")
    assert len(refused) == 2, "a step, and what a checkpoint is made of"
    assert all(each.startswith("RuntimeError: swap-optimizer: a step of this") for each in refused)
    assert found["record"]["successful"]


def test_an_early_load_without_memory_is_made_later(pool):
    (expected,) = pool.run(f"{CASES}:loading_fails", 1, error=None, **DISTRIBUTED)
    assert pool.run(f"{CASES}:loading_fails", 1, error=torch.OutOfMemoryError, **DISTRIBUTED) == [expected]
    (other,) = pool.run(f"{CASES}:loading_fails", 1, error=ZeroDivisionError, **DISTRIBUTED)
    assert (expected["raised"], other["raised"]) == ("", "ZeroDivisionError")


def test_a_model_that_outlives_its_optimizer_keeps_nothing_of_it(pool):
    (found,) = pool.run(f"{CASES}:second_optimizer", 1, **DISTRIBUTED)
    assert found["next"] == found["one"] > 0


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, PLAIN, id="plain"),
        pytest.param(2, DISTRIBUTED, id="distributed", marks=pytest.mark.full),
        pytest.param(2, {**DISTRIBUTED, "from_state_dict": True}, id="from a state dict"),
    ],
)
def test_reload_takes_the_models_weights(pool, ranks, options):
    off = pool.run(f"{JOB}:reload", ranks, **options)
    assert pool.run(f"{JOB}:reload", ranks, switches=ON, **options) == off


@pytest.mark.parametrize(
    ("ranks", "options", "expected"),
    [
        pytest.param(1, PLAIN, 12, id="dp1"),
        pytest.param(1, DISTRIBUTED, 12, id="dp1, distributed", marks=pytest.mark.full),
        pytest.param(2, PLAIN, 12, id="dp2", marks=pytest.mark.full),
        pytest.param(2, DISTRIBUTED, 6, id="dp2, distributed", marks=pytest.mark.full),
        pytest.param(1, {**DISTRIBUTED, "precision": "fp32"}, 8, id="fp32", marks=pytest.mark.full),
    ],
)
def test_bytes_a_parameter_at_rest(pool, ranks, options, expected):
    saved, host = saved_at_rest(pool, ranks, ON, **options)
    assert saved == pytest.approx(expected, rel=0.02)
    assert host == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("times", [16, pytest.param(4, marks=pytest.mark.full)])
def test_peak_of_a_step_over_rest(pool, times):
    (found,) = pool.run(f"{CASES}:peaks", 1, switches={**ON, "swap_optimizer_times": times})
    (off,) = pool.run(f"{CASES}:peaks", 1, switches=OFF)
    print(f"peaks in bytes a parameter, with and without: {found} {off}")
    for step in ("first", "second"):
        assert 24 / times < found[step] <= 36 / times, step
    assert found["construction"] <= 6 * found["largest"] + 0.1, "one master weight at a time"
    assert found["load"] < 0.1, "moments are read into their places"
    assert off["load"] >= 8
    assert off["construction"] >= 4, "master weights"
    assert off["first"] >= 8, "moments"


def test_old_parameter_states_are_read_into_the_host(pool):
    found = [pool.run(f"{CASES}:legacy_state", 1, switches=switches) for switches in (ON, OFF)]
    assert found[0] == found[1]


def test_every_row_is_applied_and_undone(pool):
    (result,) = pool.run("tests.features.attention.cases:arm_and_undo", 1, switches=ON)
    states = {(site["target"], site["state"]) for site in result["sites"]}
    for patch in FEATURE.patches:
        assert (patch.label, "applied") in states
    assert result["still changed after disable"] == []


def test_an_optimizer_that_outlives_the_feature_fails_loudly(pool):
    (message,) = pool.run(f"{JOB}:step_after_undo", 1, switches=ON)
    assert "refers to a single memory location" in message


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"optimizer_options": {"optimizer_cpu_offload": True}}, "optimizer_cpu_offload"),
        ({"optimizer_options": {"optimizer": "sgd"}}, "as 'sgd'"),
        ({"switches": {**ON, "reuse_fp32_param": True}}, "--swap-optimizer alone"),
    ],
)
def test_what_nobody_saw_the_arguments_of_is_checked_too(pool, options, named):
    (message,) = pool.run(f"{JOB}:error_of_build", 1, **{"switches": ON, **options})
    assert "swap-optimizer" in message
    assert named in message


def test_too_little_host_memory_is_told_before_training(pool):
    (message,) = pool.run(f"{CASES}:without_memory", 1, switches=ON)
    assert message.startswith("SettingsError: swap-optimizer: needs ")
    assert "0.00 GiB free" in message


def arguments(**given):
    return SimpleNamespace(**{"bf16": True, "optimizer": "adam", "swap_optimizer": True, **given})


def test_ordinary_arguments_are_accepted():
    assert problems(arguments(fp8=None, use_precision_aware_optimizer=False)) == []
    assert problems(arguments(bf16=False, swap_optimizer_times=1)) == []
    assert problems(SimpleNamespace()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"swap_optimizer_times": 0}, "use 1 or more"),
        ({"swap_optimizer": False, "swap_optimizer_times": 8}, "no effect without --swap-optimizer"),
        ({"use_precision_aware_optimizer": True}, "one of the two"),
        ({"optimizer_cpu_offload": True}, "one of the two"),
        ({"fp8": "hybrid"}, "--fp8-format"),
        ({"fp4": "e2m1"}, "--fp4-format"),
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp"),
        ({"use_torch_fsdp2": True}, "use_torch_fsdp2"),
        ({"qk_clip": True}, "--qk-clip"),
        ({"log_params_norm": True}, "--log-params-norm"),
        ({"rl_offload_optimizer_during_inference": True}, "host"),
        ({"optimizer": "sgd"}, "--optimizer sgd"),
    ],
)
def test_what_does_not_combine_is_refused_with_a_reason(given, said):
    (problem,) = problems(arguments(**given))
    assert problem.startswith("--swap-optimizer")
    assert said in problem


def test_all_problems_are_told_at_once():
    assert len(problems(arguments(fp8="hybrid", qk_clip=True, optimizer="muon"))) == 3
