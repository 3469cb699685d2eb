"""Features of some Megatron-core releases that memory features do not combine with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa import features
from tests.features.memory.pairs import FEATURES

RECOMPUTE = {"recompute-activation-function", "recompute-norm"}
DECLARED = {feature.name: feature for feature in features.built_in()}


def problems(name, **arguments):
    return DECLARED[name].problems(SimpleNamespace(**arguments))


@pytest.mark.parametrize("name", FEATURES)
def test_more_weight_shards_than_tensor_parallel_ranks(name):
    (problem,) = problems(name, tensor_parallel_num_weight_shards=4, tensor_model_parallel_size=2)
    assert problem.startswith(f"--{name} does not combine with --tensor-parallel-num-weight-shards 4")
    (problem,) = problems(
        name,
        expert_tensor_parallel_num_weight_shards=2,
        expert_tensor_parallel_size=1,
        tensor_model_parallel_size=2,
    )
    assert "--expert-tensor-parallel-num-weight-shards 2" in problem
    assert "use 1 or omit" in problem
    assert not problems(name, tensor_parallel_num_weight_shards=2, tensor_model_parallel_size=2)
    assert not problems(name, tensor_parallel_num_weight_shards=None)


@pytest.mark.parametrize("name", sorted(RECOMPUTE))
def test_hyper_connections_that_are_recomputed_together(name):
    (problem,) = problems(name, recompute_granularity="selective", recompute_modules=["mhc"])
    assert problem.startswith(f"--{name} cannot be used with --recompute-modules mhc")
    assert not problems(name, recompute_granularity="selective", recompute_modules=["core_attn"])


@pytest.mark.parametrize("name", sorted(FEATURES.keys() - RECOMPUTE))
def test_the_fsdp_of_older_releases(name):
    (problem,) = problems(name, use_custom_fsdp=True)
    assert "custom" in problem
    assert "use --use-distributed-optimizer" in problem
