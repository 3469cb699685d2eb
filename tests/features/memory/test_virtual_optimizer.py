from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.memory import kernel_moments
from mindspeed_dsa.features.memory.host_moments import Moments
from mindspeed_dsa.features.memory.virtual_optimizer import FEATURE, problems, quota_of
from mindspeed_dsa.patches.errors import SettingsError
from tests.features.memory.training import (
    DISTRIBUTED,
    JOB,
    LARGER,
    OFF,
    PLAIN,
    assert_same_training,
    assert_skipped,
    layouts,
    saved_at_rest,
)

ALL = {"virtual_optimizer": ["all"]}
REUSE = {"reuse_fp32_param": True}
PLACED = {"voided": False, "moments on the host": 1, "optimizers": 1}
CASES = "tests.features.memory.swap_optimizer_cases"


@pytest.mark.parametrize(("ranks", "options"), list(layouts(["dp2, distributed"])))
def test_ten_steps_are_the_same_bits_with_a_skipped_step_in_the_middle(pool, ranks, options):
    for run in assert_same_training(pool, ranks, ALL, skip=5, clip=0.5, **options):
        assert_skipped(run, 5)
        assert run["placed"] == PLACED


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize(("ranks", "options"), [(1, PLAIN), (2, DISTRIBUTED)], ids=["plain", "distributed"])
def test_other_types_of_weights(pool, precision, ranks, options):
    # Without scaling or sharding, Megatron's optimizer of float32 weights skips no step.
    skip = None if precision == "fp32" and not options else 2
    for run in assert_same_training(pool, ranks, ALL, steps=5, skip=skip, precision=precision, **options):
        assert run["placed"] == PLACED


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, PLAIN, id="plain", marks=pytest.mark.full),
        pytest.param(2, DISTRIBUTED, id="distributed"),
    ],
)
def test_with_weights_that_share_a_storage_with_their_masters(pool, ranks, options):
    both = {**REUSE, **ALL}
    for run in assert_same_training(pool, ranks, both, base=REUSE, steps=6, skip=3, clip=0.5, **options):
        assert run["placed"] == {**PLACED, "voided": True}


@pytest.mark.full
def test_experts_with_an_optimizer_of_their_own(pool):
    for run in assert_same_training(pool, 2, ALL, steps=4, skip=2, clip=0.5, ep=2, **DISTRIBUTED):
        assert run["placed"] == {**PLACED, "optimizers": 2}


@pytest.mark.full
def test_a_quota_is_for_all_optimizers_of_a_process(pool):
    (whole, _) = pool.run(f"{JOB}:bytes_at_rest", 2, switches=ALL, ep=2, **DISTRIBUTED, **LARGER)
    half = {"virtual_optimizer": [whole["host"] / 2 / 2**30]}
    runs = assert_same_training(pool, 2, half, steps=3, ep=2, **DISTRIBUTED, **LARGER)
    (found, _) = pool.run(f"{JOB}:bytes_at_rest", 2, switches=half, ep=2, **DISTRIBUTED, **LARGER)
    assert 0.3 * whole["host"] < found["host"] <= 0.5 * whole["host"] + 100
    assert 0 < runs[0]["placed"]["moments on the host"] < 0.6


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "options"), [(1, PLAIN), (2, DISTRIBUTED)], ids=["plain", "distributed"])
def test_reload_takes_the_models_weights(pool, ranks, options):
    off = pool.run(f"{JOB}:reload", ranks, **options)
    assert pool.run(f"{JOB}:reload", ranks, switches=ALL, **options) == off


@pytest.mark.parametrize(
    ("ranks", "options", "expected"),
    [
        pytest.param(1, PLAIN, 8, id="dp1"),
        pytest.param(1, DISTRIBUTED, 8, id="dp1, distributed", marks=pytest.mark.full),
        pytest.param(2, PLAIN, 8, id="dp2", marks=pytest.mark.full),
        pytest.param(2, DISTRIBUTED, 4, id="dp2, distributed", marks=pytest.mark.full),
    ],
)
def test_bytes_a_parameter_at_rest(pool, ranks, options, expected):
    saved, on_the_host = saved_at_rest(pool, ranks, ALL, **options)
    assert saved == pytest.approx(expected, rel=0.02)
    assert on_the_host == pytest.approx(expected, rel=0.02)


def test_old_parameter_states_are_read_into_their_places(pool):
    found = [pool.run(f"{CASES}:legacy_state", 1, switches=switches) for switches in (ALL, OFF)]
    assert found[0] == found[1]


KERNELS = "tests.features.memory.kernel_moments_cases"


@pytest.mark.parametrize(
    ("way", "options"),
    [
        pytest.param("dp_reshardable", DISTRIBUTED, id="dp_reshardable"),
        pytest.param("torch_dist", PLAIN, id="plain, torch_dist", marks=pytest.mark.full),
        pytest.param("torch", DISTRIBUTED, id="torch", marks=pytest.mark.full),
        pytest.param("fully_reshardable", DISTRIBUTED, id="fully_reshardable", marks=pytest.mark.full),
        pytest.param("torch", PLAIN, id="plain, torch", marks=pytest.mark.full),
    ],
)
def test_memory_that_only_kernels_reach(pool, tmp_path, way, options):
    whole = pool.run(f"{JOB}:train", 2, steps=4, **options)
    at_save = pool.run(f"{KERNELS}:train", 2, steps=2, save=(way, str(tmp_path)), switches=ALL, **options)
    resumed = pool.run(
        f"{KERNELS}:train", 2, steps=2, first=2, load=(way, str(tmp_path)), switches=ALL, **options
    )
    for expected, before, found in zip(whole, at_save, resumed, strict=True):
        assert found["calls"] == 2 * len(found["masters"]) > 0, "every parameter in every step"
        for what in ("weights", "masters", "moments"):
            assert found["loaded"][what] == before[what]
            assert found[what] == expected[what]
        assert found["records"] == expected["records"][2:]
        assert found["placed"] == PLACED


def test_old_parameter_states_are_read_into_memory_that_only_kernels_reach(pool):
    found = pool.run(f"{KERNELS}:legacy_state", 1, switches=ALL)
    assert found == pool.run(f"{CASES}:legacy_state", 1, switches=OFF)


def test_another_optimizer_than_the_kernels_is_refused(pool):
    options = {"optimizer_options": {"decoupled_weight_decay": False}}
    (message,) = pool.run(f"{KERNELS}:error_of_build", 1, switches=ALL, **options)
    assert message.startswith("SettingsError: virtual-optimizer: on NPUs only torch_npu's AdamW")


def test_gradients_are_back_after_the_operator_has_failed(monkeypatch):
    parameters = [torch.ones(4, requires_grad=True) for _ in range(3)]
    gradients = [torch.full((4,), float(number)) for number in range(3)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.AdamW(parameters)
    places = {each: (torch.zeros(4), torch.zeros(4)) for each in parameters}
    calls = []

    def fails(parameter: torch.Tensor, *unused: object) -> None:
        calls.append(parameter)
        if len(calls) == 3:
            raise ZeroDivisionError

    monkeypatch.setattr(kernel_moments, "apply_adamw", fails)
    with pytest.raises(ZeroDivisionError):
        kernel_moments.step(optimizer, Moments(optimizer, places), lambda: None)
    assert [each.grad for each in parameters] == gradients


def test_adamw_that_is_no_subclass_of_adam(monkeypatch):
    """As in torch before 2.7, where its groups do not say either that the decay is decoupled."""

    class Old(torch.optim.Optimizer):
        pass

    optimizer = Old([torch.ones(4)], {"weight_decay": 0.1})
    with pytest.raises(SettingsError, match="AdamW operator"):
        kernel_moments.require_adamw(optimizer)
    monkeypatch.setattr(torch.optim, "AdamW", Old)
    kernel_moments.require_adamw(optimizer)


def test_every_row_is_applied_and_undone(pool):
    (result,) = pool.run("tests.features.attention.cases:arm_and_undo", 1, switches=ALL)
    states = {(site["target"], site["state"]) for site in result["sites"]}
    for patch in FEATURE.patches:
        assert (patch.label, "applied") in states
    assert result["still changed after disable"] == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"optimizer_options": {"optimizer_cpu_offload": True}}, "optimizer_cpu_offload"),
        ({"optimizer_options": {"optimizer": "sgd"}}, "as 'sgd'"),
        ({"switches": {**ALL, "swap_optimizer": True}}, "both move the moments"),
        ({"switches": {"virtual_optimizer": [1, 2]}}, "2 quotas for 1 pipeline stages"),
        ({"switches": {"virtual_optimizer": ["some"]}}, "some"),
    ],
)
def test_what_nobody_saw_the_arguments_of_is_checked_too(pool, options, named):
    (message,) = pool.run(f"{JOB}:error_of_build", 1, **{"switches": ALL, **options})
    assert "virtual-optimizer" in message
    assert named in message


def test_too_little_host_memory_is_told_before_training(pool):
    (message,) = pool.run(f"{CASES}:without_memory", 1, switches=ALL)
    assert message.startswith("SettingsError: virtual-optimizer: needs ")
    assert "0.00 GiB free" in message


def test_a_quota_for_all_stages_or_one_for_each():
    assert quota_of(["all"], 3, 4) == float("inf")
    assert quota_of(["1.5"], 3, 4) == 1.5 * 2**30
    assert quota_of(2, 0, 1) == 2 * 2**30
    assert [quota_of(["1", "all", "0.5"], stage, 3) / 2**30 for stage in range(3)] == [1, float("inf"), 0.5]
    with pytest.raises(ValueError, match="2 quotas for 3 pipeline stages"):
        quota_of(["1", "2"], 0, 3)


def arguments(**given):
    values = {"optimizer": "adam", "virtual_optimizer": ["all"], "pipeline_model_parallel_size": 1}
    return SimpleNamespace(**{**values, **given})


def test_ordinary_arguments_are_accepted():
    assert problems(arguments(fp8=None, bf16=True)) == []
    assert problems(arguments(virtual_optimizer=["4", "2.5"], pipeline_model_parallel_size=2)) == []
    assert problems(SimpleNamespace()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"virtual_optimizer": ["0"]}, "above 0"),
        ({"virtual_optimizer": ["nan"]}, "above 0"),
        ({"virtual_optimizer": ["some"]}, "'all' or a number"),
        ({"virtual_optimizer": ["1", "2"]}, "2 quotas for 1"),
        ({"use_precision_aware_optimizer": True}, "one of the two"),
        ({"optimizer_cpu_offload": True}, "one of the two"),
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp"),
        ({"optimizer": "sgd"}, "--optimizer sgd"),
    ],
)
def test_what_does_not_combine_is_refused_with_a_reason(given, said):
    (problem,) = problems(arguments(**given))
    assert problem.startswith("--virtual-optimizer")
    assert said in problem
