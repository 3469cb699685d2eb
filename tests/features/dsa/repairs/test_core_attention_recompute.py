from __future__ import annotations

import pytest
import torch

CASES = "tests.features.dsa.core_cases"
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


def step(pool, overrides, **arguments):
    (result,) = pool.run(f"{CASES}:one_step", 1, overrides=overrides, **arguments)
    return result


@pytest.fixture(scope="module")
def plain(pool):
    return step(pool, {})


def test_same_losses_and_gradients_bit_for_bit(pool, plain):
    recomputed = step(pool, SELECTIVE)
    assert recomputed["loss"] == plain["loss"]
    for name, gradient in plain["gradients"].items():
        if gradient is not None:
            assert torch.equal(recomputed["gradients"][name], gradient), name


def test_the_attention_runs_twice_and_its_loss_counts_once(pool, plain):
    recomputed = step(pool, SELECTIVE)
    assert plain["counts"]["unfused_dsa_fn"] == 2
    assert recomputed["counts"]["unfused_dsa_fn"] == 4
    assert recomputed["counts"]["rotate_activation"] == 2 * plain["counts"]["rotate_activation"]
    assert recomputed["counts"]["compute_dsa_indexer_loss"] == 2
    assert torch.equal(recomputed["tracked"], plain["tracked"])


def test_no_score_matrix_is_kept_for_backward(pool, plain):
    assert plain["score matrices kept"] > 0
    assert step(pool, SELECTIVE)["score matrices kept"] == 0


def test_without_a_loss_the_indexer_still_gets_its_zeros(pool):
    recomputed = step(pool, {**SELECTIVE, "dsa_indexer_loss_coeff": None})
    indexer = [gradient for name, gradient in recomputed["gradients"].items() if "indexer" in name]
    assert len(indexer) == 10
    assert all(gradient is not None and not gradient.any() for gradient in indexer)


def test_without_the_repair_megatron_fails(pool):
    without = {"overrides": SELECTIVE, "switches": {"no_dsa_repairs": "core-attention-recompute"}}
    (error,) = pool.run("tests.support.model:error_of", 1, case=f"{CASES}:one_step", **without)
    assert "missing 2 required positional arguments: 'x' and 'qr'" in error


def test_full_recomputation_is_left_alone(pool, plain):
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recomputed = step(pool, full)
    assert recomputed["counts"]["unfused_dsa_fn"] == 4
    assert torch.equal(recomputed["tracked"], plain["tracked"])
