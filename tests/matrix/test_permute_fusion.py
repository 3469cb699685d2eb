"""The fused permutation on other releases of Megatron-core: the same step as in their own form."""

from __future__ import annotations

from tests.matrix.model import EXPERTS
from tests.support.model import assert_same_gradients

CASE = "tests.matrix.moe_cases:permutations"


def test_a_step_with_experts(pool):
    (stock,) = pool.run(CASE, 1, switches={}, overrides=EXPERTS)
    on = {"moe_permute_fusion": True}
    (fused,) = pool.run(CASE, 1, switches=on, overrides={**EXPERTS, **on})
    assert fused["losses"] == stock["losses"]
    assert_same_gradients(fused["gradients"], stock["gradients"], rtol=1e-6)
    assert stock["calls"] == {"permute": 0, "unpermute": 0, "sort_chunks": 0}
    assert fused["calls"] == {"permute": 1, "unpermute": 1, "sort_chunks": 2}
