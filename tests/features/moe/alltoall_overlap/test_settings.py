"""Settings that overlapped all-to-alls refuse before training."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_dsa.features.moe.alltoall_overlap.feature import FEATURE
from tests.support import moe

EP2 = {
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": False,
    "cuda_graph_impl": "none",
}


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        (
            {"overlap_dispatch_backward_with_experts_wgrad": True},
            "--overlap-dispatch-backward-with-experts-wgrad",
        ),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ({"external_cuda_graph": True}, "--external-cuda-graph: a graph holds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_in_one_sentence(arguments, flag):
    moe.assert_refused(FEATURE, EP2, arguments, "--moe-alltoall-overlap-comm", flag)


def test_megatrons_own_overlap_gives_way():
    args = Namespace(moe_shared_expert_overlap=True)
    (line,) = FEATURE.rewrite(args)
    assert not args.moe_shared_expert_overlap
    assert "--moe-alltoall-overlap-comm, in place of --moe-shared-expert-overlap" in line
    assert FEATURE.rewrite(args) == []
