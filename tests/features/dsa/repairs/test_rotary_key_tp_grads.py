from __future__ import annotations

import pytest
import torch

from tests.support.model import assert_same_gradients, put_together

RUN = "tests.features.dsa.fused_cases:whole_step"
SPLIT = "tests.features.dsa.fused_cases:step_with_split_down_projections"
DENSE = {  # Megatron needs sequence parallelism for experts
    "num_moe_experts": None,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
}


@pytest.fixture(scope="module")
def one_rank(pool):
    return put_together(pool.run(RUN, 1, overrides=DENSE))


@pytest.mark.full
def test_tensor_parallel_gradients_without_sequence_parallelism(pool, one_rank):
    ranks = pool.run(RUN, 2, tp=2, sequence_parallel=False, overrides=DENSE)
    assert_same_gradients(put_together(ranks), one_rank)


def test_without_the_repair_the_rotary_keys_part_is_wrong_and_the_copies_differ(pool, one_rank):
    without = {"no_dsa_repairs": "rotary-key-tp-grads"}
    ranks = pool.run(RUN, 2, tp=2, sequence_parallel=False, overrides=DENSE, switches=without)
    # The last layer: lower layers inherit the error.
    name = "decoder.layers.1.self_attention.linear_kv_down_proj.weight"
    left, right = (rank["gradients"][name] for rank in ranks)
    latent = slice(0, 16)  # kv_lora_rank rows, followed by the rotary key's
    torch.testing.assert_close(left[latent], one_rank[name][latent], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(left[16:], right[16:], rtol=0.1)
    torch.testing.assert_close(left[16:] + right[16:], one_rank[name][16:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("switches", [{}, {"use_fused_dsa": True}], ids=["Megatron's form", "absorbed"])
def test_split_down_projections(pool, one_rank, switches, sequence_parallel):
    ranks = pool.run(SPLIT, 2, tp=2, sequence_parallel=sequence_parallel, overrides=DENSE, switches=switches)
    weights = [f"decoder.layers.0.self_attention.linear_{name}_down_proj.weight" for name in ("q", "kv")]
    assert [ranks[0]["split"][weight] for weight in weights] == [0, 0]
    assert_same_gradients(put_together(ranks), one_rank)
