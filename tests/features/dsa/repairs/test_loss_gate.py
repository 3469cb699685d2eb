from __future__ import annotations

import pytest
import torch

CASES = "tests.features.dsa.core_cases"


def step(pool, coefficient, **arguments):
    (result,) = pool.run(
        f"{CASES}:one_step", 1, overrides={"dsa_indexer_loss_coeff": coefficient}, **arguments
    )
    return result


@pytest.fixture(scope="module")
def with_loss(pool):
    result = step(pool, 1.0)
    assert result["counts"]["compute_dsa_indexer_loss"] == 2  # one per layer
    return result


@pytest.mark.parametrize("coefficient", [0.0, None])
def test_no_loss_work_and_the_same_model(pool, with_loss, coefficient):
    result = step(pool, coefficient)
    assert result["counts"]["compute_dsa_indexer_loss"] == 0
    assert result["counts"]["unfused_dsa_fn"] == 2
    assert result["tracked"] is None
    # Only attention saves its score matrix for backward, one per layer.
    assert result["score matrices kept"] < with_loss["score matrices kept"]
    assert result["loss"] == with_loss["loss"]
    for name, gradient in with_loss["gradients"].items():
        mine = result["gradients"][name]
        if "indexer" in name:
            assert torch.count_nonzero(mine) == 0
            assert torch.count_nonzero(gradient) > 0
        elif gradient is not None:
            assert torch.equal(mine, gradient), name


def test_without_the_repair_a_coefficient_of_none_crashes(pool):
    without = {"overrides": {"dsa_indexer_loss_coeff": None}, "switches": {"no_dsa_repairs": "loss-gate"}}
    (error,) = pool.run("tests.support.model:error_of", 1, case=f"{CASES}:one_step", **without)
    assert error.startswith("TypeError")


def test_without_the_repair_coefficient_zero_is_worked_for(pool):
    assert (
        step(pool, 0.0, switches={"no_dsa_repairs": "loss-gate"})["counts"]["compute_dsa_indexer_loss"] == 2
    )


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_evaluation_does_no_loss_work(pool, with_loss, mode):
    result = step(pool, 1.0, mode=mode)
    assert result["counts"]["compute_dsa_indexer_loss"] == 0
    assert result["loss"] == with_loss["loss"]
    assert result["tracked"] is None


def test_evaluation_with_gradients_keeps_no_graph_of_the_scores(pool):
    with_graph = step(pool, 1.0, mode="eval", switches={"no_dsa_repairs": "loss-gate"})
    assert step(pool, 1.0, mode="eval")["score matrices kept"] < with_graph["score matrices kept"]


@pytest.mark.parametrize("mode", ["train", pytest.param("eval", marks=pytest.mark.full)])
def test_scores_that_others_ask_for_keep_their_gradient(pool, mode):
    """Gradients of scores are bit-identical to Megatron's own code."""
    (expected,) = pool.run(f"{CASES}:scores_alone", 1, mode=mode, switches={"no_dsa_repairs": "loss-gate"})
    (ours,) = pool.run(f"{CASES}:scores_alone", 1, mode=mode)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.count_nonzero(gradient) > 0, name
        assert torch.equal(ours[name], gradient), name


@pytest.mark.parametrize("coefficient", [pytest.param(0.0, marks=pytest.mark.full), None, 1.0])
def test_overlapped_gradient_reduction_completes(pool, coefficient):
    ranks = pool.run(f"{CASES}:overlapped_step", 2, coefficient=coefficient, timeout_s=60)
    for name, gradient in ranks[0]["gradients"].items():
        assert torch.equal(gradient, ranks[1]["gradients"][name]), name
        assert ("indexer" in name and not coefficient) == (torch.count_nonzero(gradient) == 0), name
