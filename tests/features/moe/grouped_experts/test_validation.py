from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.moe.grouped_experts.experts import validate_on_every_device
from mindspeed_dsa.features.moe.grouped_experts.feature import FEATURE

GROUPED = {"moe_grouped_gemm": True, "transformer_impl": "local"}
ZERO = {"use_distributed_optimizer": True, "save": "here"}
BUFFERS = {**ZERO, "ckpt_format": "torch", "moe_ffn_hidden_size": 64}


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"add_bias_linear": True}, "--disable-bias-linear"),
        ({"fp8": "e4m3"}, "--fp8-format"),
        ({"optimizer": "dist_muon"}, "another optimizer"),
        ({"optimizer": "soap"}, "another optimizer"),
        ({**ZERO, "dist_ckpt_optim_fully_reshardable": False}, "--dist-ckpt-optim-fully-reshardable"),
        (
            {**ZERO, "dist_ckpt_optim_fully_reshardable": True, "non_persistent_ckpt_type": "local"},
            "another order than single ones; use global",
        ),
        ({**BUFFERS, "hidden_size": 32, "overlap_grad_reduce": True}, "--ckpt-format torch_dist"),
        (
            {**BUFFERS, "hidden_size": 32, "moe_ffn_hidden_size": 33},
            "--ckpt-format torch_dist",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_way_out(arguments, remedy):
    (problem,) = FEATURE.problems(SimpleNamespace(**GROUPED, **arguments))
    assert problem.startswith("--moe-grouped-gemm: ")
    assert remedy in problem
    transformer_engine = {"moe_grouped_gemm": True, "transformer_impl": "transformer_engine"}
    assert not FEATURE.problems(SimpleNamespace(**transformer_engine, **arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"use_torch_fsdp2": True, "ckpt_format": "torch_dist"},
        {**ZERO, "dist_ckpt_optim_fully_reshardable": True, "ckpt_format": "torch_dist"},
        {**ZERO, "dist_ckpt_optim_fully_reshardable": False, "no_save_optim": True},
        {"save": "here", "ckpt_format": "torch"},
        {**BUFFERS, "hidden_size": 32, "moe_ffn_hidden_size": 34},
        {
            **BUFFERS,
            "hidden_size": 32,
            "moe_ffn_hidden_size": 34,
            "overlap_grad_reduce": True,
            "expert_model_parallel_size": 2,
        },
        {**ZERO, "ckpt_fully_parallel_save": False},
    ],
)
def test_what_is_served(arguments):
    assert not FEATURE.problems(SimpleNamespace(**GROUPED, **arguments))


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_only_transformer_engine_needs_a_gpu(implementation):
    """Megatron's GPU check is skipped for local modules; all other checks see the user's flag."""
    args = SimpleNamespace(moe_grouped_gemm=True, transformer_impl=implementation)
    seen = []

    def validate_args(args, defaults):
        seen.append(args.moe_grouped_gemm)
        if defaults:
            raise ValueError("wrong")
        return args

    wrapped = validate_on_every_device(validate_args)
    assert wrapped(args, {}) is args
    with pytest.raises(ValueError, match="wrong"):
        wrapped(args, {"wrong": True})
    assert seen == [implementation != "local"] * 2
    assert args.moe_grouped_gemm
