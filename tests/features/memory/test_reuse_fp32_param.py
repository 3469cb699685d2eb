from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.memory.reuse_fp32_param import FEATURE, problems
from tests.features.memory.training import (
    COMPARED,
    DISTRIBUTED,
    JOB,
    OFF,
    PLAIN,
    assert_same_training,
    assert_skipped,
    layouts,
    saved_at_rest,
)

ON = {"reuse_fp32_param": True}
VOIDED = {"voided": True, "moments on the host": 0, "optimizers": 1}


@pytest.mark.parametrize(
    ("ranks", "options"), list(layouts(["dp1", "dp2, distributed", "dp2, distributed, overlap"]))
)
def test_ten_steps_are_the_same_bits_with_a_skipped_step_in_the_middle(pool, ranks, options):
    for run in assert_same_training(pool, ranks, ON, skip=5, clip=0.5, **options):
        assert_skipped(run, 5)
        assert run["placed"] == VOIDED


@pytest.mark.parametrize("options", [PLAIN, DISTRIBUTED], ids=["plain", "distributed"])
def test_without_clipping(pool, options):
    assert_same_training(pool, 1, ON, steps=4, clip=0.0, **options)


def test_small_blocks_make_the_same_training(pool):
    (whole,) = pool.run(f"{JOB}:train", 1, switches=ON, steps=3, distributed=True)
    (blocks,) = pool.run(f"{JOB}:train", 1, switches=ON, steps=3, distributed=True, block=64)
    for what in COMPARED:
        assert blocks[what] == whole[what], what


def test_a_step_that_fails_leaves_weights(pool):
    for ranks, options in ((1, PLAIN), (2, DISTRIBUTED)):
        for result in pool.run(f"{JOB}:fail_in_the_step", ranks, switches=ON, **options):
            assert result == {"error": "out of luck", "shard is as before": True, "placed": VOIDED}


@pytest.mark.full
def test_reload_takes_the_models_weights(pool):
    for ranks, options in ((1, PLAIN), (1, DISTRIBUTED), (2, DISTRIBUTED)):
        off = pool.run(f"{JOB}:reload", ranks, switches=OFF, **options)
        on = pool.run(f"{JOB}:reload", ranks, switches=ON, **options)
        assert on == off


@pytest.mark.parametrize("ranks", [1, 2])
def test_reload_takes_master_weights_from_a_state_dict(pool, ranks):
    off = pool.run(f"{JOB}:reload", ranks, switches=OFF, distributed=True, from_state_dict=True)
    on = pool.run(f"{JOB}:reload", ranks, switches=ON, distributed=True, from_state_dict=True)
    assert on == off


SAVED = 2.0  # bytes a parameter; by DP with the distributed optimizer


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, PLAIN, id="dp1"),
        pytest.param(1, DISTRIBUTED, id="dp1, distributed", marks=pytest.mark.full),
        pytest.param(2, PLAIN, id="dp2", marks=pytest.mark.full),
        pytest.param(2, DISTRIBUTED, id="dp2, distributed", marks=pytest.mark.full),
    ],
)
def test_bytes_a_parameter_at_rest(pool, ranks, options):
    saved, _ = saved_at_rest(pool, ranks, ON, **options)
    assert saved == pytest.approx(SAVED / (ranks if "distributed" in options else 1), rel=0.02)


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
        ({"optimizer_options": {"bf16": False}}, "bf16=True"),
    ],
)
def test_the_optimizer_is_checked_where_nobody_saw_the_arguments(pool, options, named):
    (message,) = pool.run(f"{JOB}:error_of_build", 1, switches=ON, distributed=True, **options)
    assert message.startswith("SettingsError: reuse-fp32-param")
    assert named in message


def arguments(**given):
    return SimpleNamespace(**{"bf16": True, "fp16": False, "optimizer": "adam", **given})


def test_ordinary_arguments_are_accepted():
    assert problems(arguments(fp8=None, use_precision_aware_optimizer=False, qk_clip=False)) == []
    assert problems(SimpleNamespace()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"bf16": False}, "add --bf16"),
        ({"use_precision_aware_optimizer": True}, "store_param_remainders"),
        ({"optimizer_cpu_offload": True}, "host"),
        ({"fp8": "hybrid"}, "--fp8-format"),
        ({"fp4": "e2m1"}, "--fp4-format"),
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp"),
        ({"use_torch_fsdp2": True}, "use_torch_fsdp2"),
        ({"nccl_ub": True}, "--use-nccl-ub"),
        ({"qk_clip": True}, "--qk-clip"),
        ({"log_params_norm": True}, "--log-params-norm"),
        ({"rl_offload_optimizer_during_inference": True}, "host"),
        ({"optimizer": "muon"}, "--optimizer muon"),
    ],
)
def test_what_does_not_combine_is_refused_with_a_reason(given, said):
    (problem,) = problems(arguments(**given))
    assert problem.startswith("--reuse-fp32-param")
    assert said in problem


def test_all_problems_are_told_at_once():
    assert len(problems(arguments(fp8="hybrid", qk_clip=True, optimizer="muon"))) == 3
