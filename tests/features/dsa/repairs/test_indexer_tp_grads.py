from __future__ import annotations

import pytest
import torch

from tests.support.model import assert_same_gradients, put_together

RUN = "tests.support.model:run"


@pytest.fixture(scope="module")
def one_rank(pool):
    return put_together(pool.run(RUN, 1))


def test_tensor_and_sequence_parallel_gradients_are_those_of_one_rank(pool, one_rank):
    assert_same_gradients(put_together(pool.run(RUN, 2, tp=2)), one_rank)


def test_without_the_repair_the_indexers_gradients_are_added_up(pool, one_rank):
    summed = put_together(pool.run(RUN, 2, tp=2, switches={"no_dsa_repairs": "indexer-tp-grads"}))
    for name, gradient in one_rank.items():
        factor = 2 if "indexer" in name else 1
        atol = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(summed[name], factor * gradient, rtol=0, atol=atol)


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_type": "yarn"},
        {"dsa_indexer_use_sparse_loss": False},
        {"q_lora_rank": None},
        {"qk_layernorm": False},
        {"normalization": "LayerNorm"},
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    ],
    ids=lambda overrides: ", ".join(f"{name}={value}" for name, value in overrides.items()),
)
def test_other_models(pool, overrides):
    expected = put_together(pool.run(RUN, 1, overrides=overrides))
    assert_same_gradients(put_together(pool.run(RUN, 2, tp=2, overrides=overrides)), expected)
