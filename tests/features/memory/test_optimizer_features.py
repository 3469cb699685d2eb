"""Common properties of reuse-fp32-param, swap-optimizer and virtual-optimizer, each by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.features.memory.reuse_fp32_param.feature import FEATURE as REUSE_FP32_PARAM
from mindspeed_dsa.features.memory.swap_optimizer.feature import FEATURE as SWAP_OPTIMIZER
from mindspeed_dsa.features.memory.virtual_optimizer.feature import FEATURE as VIRTUAL_OPTIMIZER
from mindspeed_dsa.megatron.optimizer import OptimizerState
from mindspeed_dsa.patches.site import load
from tests.support.optimizer_training import (
    DISTRIBUTED,
    JOB,
    OFF,
    PLAIN,
    assert_same_training,
    assert_skipped,
    layouts,
    saved_at_rest,
)


@dataclass(frozen=True, eq=False)
class Case:
    """A feature, the place of its state, and its bytes per parameter on device and host."""

    feature: Feature
    switches: Mapping[str, Any]
    placed: Mapping[str, Any]
    saved: float
    host: float

    def __str__(self) -> str:
        return self.feature.name


def placed(voided: bool, on_the_host: int) -> dict[str, Any]:
    return {"voided": voided, "moments on the host": on_the_host, "optimizers": 1}


# Bytes per parameter: the bf16 weight (2), master weight and both moments in fp32 (12), or the moments (8).
REUSE = Case(REUSE_FP32_PARAM, {"reuse_fp32_param": True}, placed(True, 0), saved=2, host=0)
SWAP = Case(SWAP_OPTIMIZER, {"swap_optimizer": True}, placed(True, 1), saved=12, host=12)
VIRTUAL = Case(VIRTUAL_OPTIMIZER, {"virtual_optimizer": ["all"]}, placed(False, 1), saved=8, host=8)
ALL = (REUSE, SWAP, VIRTUAL)
HOST = (SWAP, VIRTUAL)
FLOAT32 = {"precision": "fp32"}
FROM_STATE_DICT = {"from_state_dict": True}


def of_each(of: Mapping[Case, Iterable[Any]], parameters: Callable[..., Iterable[Any]] = list) -> list[Any]:
    """Return pytest parameters of each case with ``parameters(...)`` of its entry in ``of``."""
    return [
        pytest.param(case, *each.values, id=f"{case}, {each.id}", marks=each.marks)
        for case, given in of.items()
        for each in parameters(given)
    ]


def named(layout: tuple[int, Mapping[str, Any]]) -> str:
    ranks, options = layout
    return ", ".join([f"dp{ranks}", *options])


def these(*quick: tuple[int, Any], full: Iterable[tuple[int, Any]] = ()) -> list[Any]:
    """Return ranks and options as pytest parameters."""
    return [
        *(pytest.param(*each, id=named(each)) for each in quick),
        *(pytest.param(*each, id=named(each), marks=pytest.mark.full) for each in full),
    ]


@pytest.mark.parametrize(
    ("case", "ranks", "options"),
    of_each(
        {
            REUSE: ["dp2, distributed, overlap"],
            SWAP: ["dp2, distributed, overlap"],
            VIRTUAL: ["dp2, distributed"],
        },
        layouts,
    ),
)
def test_ten_steps_are_the_same_bits_with_a_skipped_step_in_the_middle(pool, case, ranks, options):
    for run in assert_same_training(pool, ranks, case.switches, skip=5, clip=0.5, **options):
        assert_skipped(run, 5)
        assert run["placed"] == case.placed


@pytest.mark.parametrize("case", [REUSE, SWAP], ids=str)
@pytest.mark.parametrize(("ranks", "options"), these((2, DISTRIBUTED), full=[(1, PLAIN)]))
def test_a_step_that_fails_leaves_everything(pool, case, ranks, options):
    for result in pool.run(f"{JOB}:fail_in_the_step", ranks, switches=case.switches, **options):
        assert result == {"error": "out of luck", "shard is as before": True, "placed": case.placed}


@pytest.mark.parametrize(
    ("case", "ranks", "options"),
    of_each(
        {
            REUSE: these(
                full=[
                    (1, {**DISTRIBUTED, **FROM_STATE_DICT}),
                    (2, {**DISTRIBUTED, **FROM_STATE_DICT}),
                    (1, PLAIN),
                    (1, DISTRIBUTED),
                    (2, DISTRIBUTED),
                ],
            ),
            SWAP: these((2, {**DISTRIBUTED, **FROM_STATE_DICT}), full=[(1, PLAIN), (2, DISTRIBUTED)]),
            VIRTUAL: these(full=[(1, PLAIN), (2, DISTRIBUTED)]),
        },
    ),
)
def test_reload_takes_the_models_weights_or_those_of_a_state_dict(pool, case, ranks, options):
    off = pool.baseline(f"{JOB}:reload", ranks, switches=OFF, **options)
    assert pool.run(f"{JOB}:reload", ranks, switches=case.switches, **options) == off


AT_REST = these((1, PLAIN), full=[(1, DISTRIBUTED), (2, PLAIN), (2, DISTRIBUTED)])


@pytest.mark.parametrize(("case", "ranks", "options"), of_each(dict.fromkeys(ALL, AT_REST)))
def test_bytes_per_parameter_at_rest(pool, case, ranks, options):
    saved, host = saved_at_rest(pool, ranks, case.switches, **options)
    shards = ranks if "distributed" in options else 1
    assert saved == pytest.approx(case.saved / shards, rel=0.02)
    assert host == pytest.approx(case.host / shards, rel=0.02)


@pytest.mark.full
def test_bytes_per_parameter_at_rest_where_the_models_weights_are_the_masters(pool):
    # The model's fp32 weights are the masters, so only the moments move.
    saved, host = saved_at_rest(pool, 1, SWAP.switches, **DISTRIBUTED, **FLOAT32)
    assert (saved, host) == (pytest.approx(8, rel=0.02), pytest.approx(8, rel=0.02))


@pytest.mark.parametrize("case", HOST, ids=str)
def test_old_parameter_states_are_read_into_the_host(pool, case):
    found = pool.run(f"{JOB}:legacy_state", 1, switches=case.switches)
    assert found == pool.baseline(f"{JOB}:legacy_state", 1, switches=OFF)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_row_is_applied_and_undone(pool, case):
    (result,) = pool.run("tests.features.dsa.parts_of_dsa:arm_and_undo", 1, switches=case.switches)
    states = {(site["target"], site["state"]) for site in result["sites"]}
    for patch in case.feature.patches:
        assert (patch.label, "applied") in states
    assert result["still changed after disable"] == []


@pytest.mark.parametrize("case", ALL, ids=str)
def test_rows_are_those_of_the_methods_that_the_feature_overrides(case):
    rows = {tuple(patch.impl.split(".wrap_")) for patch in case.feature.patches if ".wrap_" in patch.impl}
    ((implementation,),) = {(name,) for name, _ in rows}
    state = load(implementation)
    assert issubclass(state, OptimizerState)
    methods = [name.removeprefix("wrap_") for name in vars(OptimizerState) if name.startswith("wrap_")]
    overridden = {name for name in methods if getattr(state, name) is not getattr(OptimizerState, name)}
    # The check for complete steps comes with the patch row.
    assert overridden <= {method for _, method in rows} <= {*overridden, "before_grads"}


@pytest.mark.parametrize("case", [REUSE, SWAP], ids=str)
def test_an_optimizer_that_outlives_the_feature_fails_loudly(pool, case):
    (message,) = pool.run(f"{JOB}:step_after_undo", 1, switches=case.switches)
    assert "refers to a single memory location" in message


OFFLOAD = {"optimizer_options": {"optimizer_cpu_offload": True}}
SGD = {"optimizer_options": {"optimizer": "sgd"}}


@pytest.mark.parametrize(
    ("case", "options", "said"),
    [
        (REUSE, {**DISTRIBUTED, **OFFLOAD}, "optimizer_cpu_offload"),
        (REUSE, {**DISTRIBUTED, "optimizer_options": {"bf16": False}}, "add --bf16"),
        (SWAP, OFFLOAD, "optimizer_cpu_offload"),
        (SWAP, SGD, "--optimizer sgd"),
        (SWAP, {"switches": {**SWAP.switches, **REUSE.switches}}, "--swap-optimizer alone"),
        (VIRTUAL, OFFLOAD, "optimizer_cpu_offload"),
        (VIRTUAL, SGD, "--optimizer sgd"),
        (VIRTUAL, {"switches": {**VIRTUAL.switches, **SWAP.switches}}, "both features move the moments"),
        (VIRTUAL, {"switches": {"virtual_optimizer": [1, 2]}}, "2 quotas for 1 pipeline stages"),
        (VIRTUAL, {"switches": {"virtual_optimizer": ["some"]}}, "some"),
    ],
)
def test_a_job_without_megatrons_parser_is_refused_when_its_optimizer_is_built(pool, case, options, said):
    (message,) = pool.run(f"{JOB}:error_of_build", 1, **{"switches": case.switches, **options})
    assert message.startswith("SettingsError: ")
    assert case.feature.name in message
    assert said in message


@pytest.mark.parametrize("case", HOST, ids=str)
def test_too_little_host_memory_is_reported_before_training(pool, case):
    (message,) = pool.run(f"{JOB}:without_memory", 1, switches=case.switches)
    assert message.startswith(f"SettingsError: {case.feature.name}: needs ")
    assert "0.00 GiB free" in message


def arguments(case, **given):
    values = {"bf16": True, "fp16": False, "optimizer": "adam", "pipeline_model_parallel_size": 1}
    return SimpleNamespace(**{**values, **case.switches, **given})


@pytest.mark.parametrize(
    ("case", "given"),
    [
        (REUSE, {"fp8": "hybrid", "use_precision_aware_optimizer": False, "qk_clip": False}),
        (REUSE, {"optimizer": "sgd"}),
        (SWAP, {"fp8": "hybrid", "use_precision_aware_optimizer": False}),
        (SWAP, {"bf16": False, "swap_optimizer_times": 1}),
        (SWAP, {"use_torch_fsdp2": True, "ckpt_format": "torch_dist"}),
        (VIRTUAL, {"fp8": "hybrid", "fp8_param_gather": True}),
        (VIRTUAL, {"virtual_optimizer": ["4", "2.5"], "pipeline_model_parallel_size": 2}),
    ],
)
def test_ordinary_arguments_are_accepted(case, given):
    assert case.feature.problems(arguments(case, **given)) == []
    assert case.feature.problems(SimpleNamespace()) == []


MOVERS = [
    ({"use_precision_aware_optimizer": True}, "one of the two"),
    ({"optimizer_cpu_offload": True}, "host"),
    ({"use_megatron_fsdp": True}, "use_megatron_fsdp"),
    ({"rl_offload_optimizer_during_inference": True}, "host"),
    ({"optimizer": "muon"}, "--optimizer muon"),
]
WRITERS = [
    ({"fp8": "hybrid", "fp8_param_gather": True}, "omit --fp8-param-gather"),
    ({"fp4": "e2m1", "fp4_param": True}, "omit --fp4-param-gather"),
]
READERS = [({"qk_clip": True}, "--qk-clip"), ({"log_params_norm": True}, "--log-params-norm")]


@pytest.mark.parametrize(
    ("case", "given", "said"),
    [
        *((case, *each) for case in ALL for each in MOVERS),
        *((case, *each) for case in (REUSE, SWAP) for each in (*WRITERS, *READERS)),
        *((case, {"optimizer": "sgd"}, "--optimizer sgd") for case in HOST),
        (REUSE, {"use_torch_fsdp2": True}, "use_torch_fsdp2"),
        (REUSE, {"bf16": False, "fp16": True}, "fp16"),
        (REUSE, {"bf16": False}, "add --bf16"),
        (REUSE, {"use_precision_aware_optimizer": True}, "store_param_remainders"),
        (REUSE, {"nccl_ub": True}, "--use-nccl-ub"),
        (REUSE, {"save_params_interval": 5, "overlap_param_gather": True}, "omit one of the two"),
        (SWAP, {"swap_optimizer_times": 0}, "use 1 or more"),
        (SWAP, {"swap_optimizer": False, "swap_optimizer_times": 8}, "no effect without --swap-optimizer"),
        (VIRTUAL, {"virtual_optimizer": ["0"]}, "above 0"),
        (VIRTUAL, {"virtual_optimizer": ["nan"]}, "above 0"),
        (VIRTUAL, {"virtual_optimizer": ["some"]}, "'all' or a number"),
        (VIRTUAL, {"virtual_optimizer": ["1", "2"]}, "2 quotas for 1"),
    ],
)
def test_what_does_not_combine_is_refused_with_a_reason(case, given, said):
    (problem,) = case.feature.problems(arguments(case, **given))
    assert problem.startswith(f"--{case.feature.name}")
    assert said in problem


def test_mapped_moments_are_not_sent_to_the_process_that_saves(monkeypatch):
    given = arguments(VIRTUAL, async_save=True, use_persistent_ckpt_worker=True)
    assert VIRTUAL.feature.problems(given) == [], "on CPUs that process is a fork"
    monkeypatch.setattr(platforms, "current", lambda: SimpleNamespace(name="cuda"))
    (problem,) = VIRTUAL.feature.problems(given)
    assert "omit --async-save" in problem
    assert VIRTUAL.feature.problems(arguments(VIRTUAL, async_save=True)) == [], "copied before a fork"


@pytest.mark.parametrize("case", [REUSE, SWAP], ids=str)
def test_all_problems_are_reported_at_once(case):
    stored = {"fp8": "hybrid", "fp8_param_gather": True}
    assert len(case.feature.problems(arguments(case, **stored, qk_clip=True, optimizer="muon"))) == 3
