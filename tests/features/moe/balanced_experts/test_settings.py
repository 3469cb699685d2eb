"""Settings of balanced experts that are refused before training, and settings that are accepted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.moe.balanced_experts.feature import FEATURE, Options

SERVED = {
    "balanced_moe_experts": True,
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "tensor_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.0,
    "transformer_impl": "local",
}


def problems(**changes):
    return FEATURE.problems(SimpleNamespace(**{**SERVED, **changes}))


def test_served():
    assert problems() == []
    assert (
        problems(deterministic_mode=True, balanced_moe_matmul_rate=100.0, balanced_moe_link_rate=25.0) == []
    )
    assert problems(use_torch_fsdp2=True) == []
    assert Options.of(SimpleNamespace(**SERVED)).hot_experts is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts": None}, "the model has no experts"),
        ({"balanced_moe_hot_expert_num": 0}, "give at least 1, and at most the 8 experts"),
        ({"balanced_moe_hot_expert_num": 9}, "give at least 1, and at most the 8 experts"),
        ({"balanced_moe_link_rate": -1.0}, "--balanced-moe-link-rate -1.0: give a positive rate"),
        ({"deterministic_mode": True, "balanced_moe_link_rate": 25.0}, "--deterministic-mode rules out"),
        ({"expert_model_parallel_size": 1}, "all experts are on every rank"),
        ({"expert_tensor_parallel_size": 2}, "add --expert-tensor-parallel-size 1"),
        ({"expert_tensor_parallel_size": None}, "add --expert-tensor-parallel-size 1"),
        ({"moe_token_dispatcher_type": "allgather"}, "use --moe-token-dispatcher-type alltoall"),
        ({"moe_token_dispatcher_type": "flex"}, "use --moe-token-dispatcher-type alltoall"),
        ({"transformer_impl": "transformer_engine"}, "add --transformer-impl local"),
        ({"moe_pad_expert_input_to_capacity": True}, "--moe-pad-expert-input-to-capacity"),
        ({"moe_latent_size": 16}, "--moe-latent-size"),
        ({"moe_apply_probs_on_input": True}, "--moe-apply-probs-on-input"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"fp8": "e4m3"}, "omit --fp8-format"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"balanced_moe_experts": False, "balanced_moe_hot_expert_num": 2}, "no effect without"),
    ],
)
def test_refused(changes, says):
    (found,) = problems(**changes)
    assert says in found


@pytest.mark.parametrize(
    ("settings", "on"),
    [({}, False), ({"balanced_moe_experts": True}, True), ({"balanced_moe_link_rate": 1.0}, True)],
)
def test_an_option_alone_is_not_ignored(settings, on):
    assert FEATURE.is_active(SimpleNamespace(**settings)) is on
