"""Combinations with overlapped halves that are refused before training starts."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_dsa.features.moe.batch_overlap.feature import FEATURE
from tests.support import moe

EP2 = {
    "moe_batch_overlap": True,
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "cuda_graph_impl": "none",
}
ALWAYS = {"moe_batch_overlap_always": True}


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size 1"),
        ({"tensor_model_parallel_size": 2}, "--expert-tensor-parallel-size 1"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({"moe_pad_expert_input_to_capacity": True}, "--moe-pad-expert-input-to-capacity"),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"fp8": "hybrid"}, "--fp8-format"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ({"deterministic_mode": True}, "--moe-batch-overlap-always"),
        ({"moe_enable_routing_replay": True}, "--moe-batch-overlap-always"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_in_one_sentence(arguments, flag):
    moe.assert_refused(FEATURE, EP2, arguments, "--moe-batch-overlap", flag)


def test_deterministic_without_measuring():
    assert not FEATURE.problems(Namespace(**EP2, **ALWAYS, deterministic_mode=True))


def test_option_without_switch():
    arguments = Namespace(**{**EP2, **ALWAYS, "moe_batch_overlap": False})
    assert FEATURE.is_active(arguments)
    (problem,) = FEATURE.problems(arguments)
    assert "--moe-batch-overlap-always has no effect without --moe-batch-overlap" in problem
