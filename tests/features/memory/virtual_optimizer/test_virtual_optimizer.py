"""Moments in mapped host memory; see also ``test_optimizer_features.py``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.memory.virtual_optimizer import mapped_moments
from mindspeed_dsa.features.memory.virtual_optimizer.feature import Options
from mindspeed_dsa.optimizers.moments import Moments
from tests.support.contexts import context
from tests.support.optimizer_training import DISTRIBUTED, JOB, LARGER, OFF, PLAIN, assert_same_training

ALL = {"virtual_optimizer": ["all"]}
REUSE = {"reuse_fp32_param": True}
PLACED = {"voided": False, "moments on the host": 1, "optimizers": 1}


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize(("ranks", "options"), [(1, PLAIN), (2, DISTRIBUTED)], ids=["plain", "distributed"])
def test_other_types_of_weights(pool, precision, ranks, options):
    # Without scaling or sharding, Megatron's optimizer of fp32 weights skips no step.
    skip = None if precision == "fp32" and not options else 2
    for run in assert_same_training(pool, ranks, ALL, steps=5, skip=skip, precision=precision, **options):
        assert run["placed"] == PLACED


@pytest.mark.full
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


KERNELS = "tests.features.memory.virtual_optimizer.kernel_cases"


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
    for expected, before, run in zip(whole, at_save, resumed, strict=True):
        assert run["calls"] == 2 * len(run["masters"]) > 0, "every parameter in every step"
        for what in ("weights", "masters", "moments"):
            assert run["loaded"][what] == before[what]
            assert run[what] == expected[what]
        assert run["records"] == expected["records"][2:]
        assert run["placed"] == PLACED


def test_old_parameter_states_are_read_into_memory_that_only_kernels_reach(pool):
    found = pool.run(f"{KERNELS}:legacy_state", 1, switches=ALL)
    assert found == pool.baseline(f"{JOB}:legacy_state", 1, switches=OFF)


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
    places = {parameter: (torch.zeros(4), torch.zeros(4)) for parameter in parameters}
    calls = []

    def fails(parameter: torch.Tensor, *unused: object) -> None:
        calls.append(parameter)
        if len(calls) == 3:
            raise ZeroDivisionError

    monkeypatch.setattr(mapped_moments, "apply_adamw", fails)
    with pytest.raises(ZeroDivisionError):
        mapped_moments.step_with_kernels(optimizer, Moments(optimizer, places), lambda: None)
    assert [parameter.grad for parameter in parameters] == gradients


def test_an_optimizer_that_is_no_adam_is_refused_on_npus():
    class Other(torch.optim.Optimizer):
        pass

    (problem,) = mapped_moments.check_adamw(Other([torch.ones(4)], {"weight_decay": 0.1}))
    assert "AdamW operator" in problem
    weight = [torch.nn.Parameter(torch.ones(4))]
    assert list(mapped_moments.check_adamw(torch.optim.AdamW(weight, weight_decay=0.1))) == []
    assert list(mapped_moments.check_adamw(torch.optim.Adam(weight, weight_decay=0.1))) == [problem]


def test_a_quota_for_all_stages_or_one_for_each():
    assert options(["all"]).quota(3, 4) == float("inf")
    assert options(["1.5"]).quota(3, 4) == 1.5 * 2**30
    assert options(2).quota(0, 1) == 2 * 2**30
    assert [options(["1", "all", "0.5"]).quota(stage, 3) / 2**30 for stage in range(3)] == [
        1,
        float("inf"),
        0.5,
    ]
    with pytest.raises(ValueError, match="2 quotas for 3 pipeline stages"):
        options(["1", "2"]).quota(0, 3)


def options(words):
    return Options.of(SimpleNamespace(virtual_optimizer=words))


def test_a_quota_is_for_all_optimizers_of_one_megatron(monkeypatch):
    monkeypatch.setattr(mapped_moments, "_quota", lambda having: 8 * 6)
    kept = []

    def moved(root):
        inner = torch.optim.AdamW([torch.ones(4, requires_grad=True)])
        having = context("virtual-optimizer", options("all"), root)
        kept.append(mapped_moments.MappedMoments.built(SimpleNamespace(optimizer=inner), having))
        return kept[-1].nbytes

    assert [moved("megatron"), moved("megatron"), moved("corp_megatron")] == [32, 0, 32]
    kept.clear()
    assert moved("megatron") == 32
