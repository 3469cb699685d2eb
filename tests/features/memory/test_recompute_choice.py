"""Layers that recompute, and settings that do not combine with recomputation."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.memory.recompute_outputs.feature import (
    ACTIVATION_FUNCTION,
    NORM,
    OUTPUTS,
)

CASES = "tests.features.memory.recompute_cases"
check_activation, check_norm, check_outputs = ACTIVATION_FUNCTION.problems, NORM.problems, OUTPUTS.problems


@pytest.mark.parametrize(
    ("switches", "layout", "world_size", "expected"),
    [
        pytest.param(
            {"recompute_activation_function_num_layers": 1},
            {},
            1,
            [([1], [1, 2, 3, 4])],
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"recompute_norm_num_layers": 2},
            {"pp": 2},
            2,
            [([1, 2], [1, 2]), ([3, 4], [3, 4])],
            marks=pytest.mark.full,
        ),
        (
            {"recompute_activation_function_num_layers": 1, "recompute_norm_num_layers": 0},
            {"pp": 2, "vpp": 2},
            2,
            [([1], []), ([2], [])],
        ),
    ],
    ids=("one process", "PP2", "PP2 x VPP2"),
)
def test_layers_of_a_built_model(pool, switches, layout, world_size, expected):
    on = {"recompute_activation_function": True, "recompute_norm": True, **switches}
    ranks = pool.run(f"{CASES}:chosen_layers", world_size, switches=on, num_layers=4, **layout)
    assert [(rank["activation"], rank["norm"]) for rank in ranks] == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fp8": "hybrid"}, "quantised copy"),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, "quantised copy"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local: "),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph: "),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "nothing left to do"),
        ({"cpu_offloading": True}, "--cpu-offloading-num-layers"),
        ({"overlap_moe_expert_parallel_comm": True}, "takes apart"),
    ],
)
def test_combinations_that_are_refused(arguments, says):
    args = SimpleNamespace(num_layers=4, **arguments)
    for check in (check_activation, check_norm):
        (problem,) = check(args)
        assert says in problem


@pytest.mark.parametrize("engine", [False, True], ids=["without Transformer Engine", "with it"])
@pytest.mark.parametrize("module", ["layernorm", "moe_act", "gdn_norm_out", "gdp_qkv"])
def test_modules_that_need_the_checkpoint(monkeypatch, module, engine):
    # With Transformer Engine, Megatron's own checkpoint runs, also in fp8, and is kept.
    original = importlib.util.find_spec
    monkeypatch.setattr(
        "mindspeed_dsa.features.memory.recompute_outputs.feature.find_spec",
        lambda name: object() if engine and name == "transformer_engine" else original(name),
    )
    args = SimpleNamespace(
        recompute_granularity="selective", recompute_modules=["core_attn", module], recompute_verify=False
    )
    assert OUTPUTS.is_active(args) is not engine
    assert check_outputs(args) == []
    args.cuda_graph_impl = "local"
    problems = check_outputs(args)
    assert len(problems) == (0 if engine else 1)
    assert all(f"--recompute-modules {module} without Transformer Engine" in problem for problem in problems)


@pytest.mark.parametrize("replaced", [False, True])
def test_megatrons_checkpoint_is_repaired_where_it_stays(pool, replaced):
    on = {"experimental_attention_variant": "dsa", "recompute_norm": replaced}
    assert pool.run(f"{CASES}:checkpoints_on", 1, switches=on) == [
        ["recompute-outputs" if replaced else "recompute-outputs-learning"]
    ]


def test_modules_whose_checkpoint_knows_that_there_is_no_fp8():
    args = SimpleNamespace(recompute_modules=["core_attn", "mla_up_proj", "mlp", "moe", "shared_experts"])
    assert not OUTPUTS.is_active(args)


@pytest.mark.parametrize(
    ("check", "module"),
    [(check_activation, "moe_act"), (check_norm, "layernorm")],
)
def test_megatrons_own_module_for_the_same_thing_is_refused(check, module):
    args = SimpleNamespace(recompute_granularity="selective", recompute_modules=["core_attn", module])
    (problem,) = check(args)
    assert f"drop {module}" in problem
    args.recompute_granularity = None  # the modules have no effect without selective recomputation
    assert check(args) == []


def test_what_goes_together_is_not_refused():
    for arguments in (
        {},
        {"cuda_graph_impl": "none", "fp8": None, "recompute_modules": ["core_attn"]},
        {"fp8": "hybrid", "fp8_recipe": "blockwise"},
        {"fp4": "e2m1"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj", "mlp"]},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"overlap_moe_expert_parallel_comm": True, "moe_fb_overlap": True},
    ):
        args = SimpleNamespace(**arguments)
        assert check_activation(args) == check_norm(args) == []
        assert check_outputs(args) == []
    (problem,) = check_activation(SimpleNamespace(use_transformer_engine_op_fuser=True))
    assert "no output of its own" in problem


@pytest.mark.parametrize("dest", ["recompute_activation_function", "recompute_norm"])
def test_numbers_of_layers(dest):
    check = check_norm if dest == "recompute_norm" else check_activation
    number = f"{dest}_num_layers"
    (problem,) = check(SimpleNamespace(num_layers=4, **{number: 2}))
    assert "has no effect without" in problem
    for wanted in (-1, 5):
        (problem,) = check(SimpleNamespace(num_layers=4, **{dest: True, number: wanted}))
        assert f"-num-layers {wanted}: use a number that is at least 0 and at most 4" in problem
    for wanted in (0, 4):
        assert check(SimpleNamespace(num_layers=4, **{dest: True, number: wanted})) == []


def test_a_model_without_megatrons_parser_is_refused_when_it_is_built(pool):
    (error,) = pool.run(
        "tests.support.model:error_of",
        1,
        case=f"{CASES}:train",
        switches={"recompute_norm": True},
        overrides={"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    )
    assert "drop layernorm from the modules" in error


def test_recomputing_beside_megatrons_own(pool):
    # Full recomputation of layer 1 with ours in layer 2; Megatron's for the MLP with ours in experts.
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    modules = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "shared_experts"]}
    for overrides, discarded in ((block, 3 * (4 + 1)), (modules, 3 * 4)):
        (plain,) = pool.run(f"{CASES}:train", 1, switches={}, overrides=overrides)
        (recomputed,) = pool.run(
            f"{CASES}:train", 1, switches={"recompute_activation_function": True}, overrides=overrides
        )
        assert recomputed["discarded"] == discarded
        for name, gradient in plain["gradients"].items():
            assert (recomputed["gradients"][name] == gradient).all(), name
