"""FP8 key selection equals the test's own selection by the formulas, in every layout and release."""

from __future__ import annotations

import pytest
import torch

from tests.support.model import assert_same_gradients, put_together
from tests.support.releases import FULL_HERE

pytestmark = pytest.mark.releases(">=0.12.1", quick=True)

STEP = "tests.matrix.selection_steps:step"
FULL = {"use_fused_dsa": True}
FP8 = {**FULL, "dsa_indexer_precision": "fp8"}
PLAIN = {**FULL, "dsa_indexer_precision": "fp8-plain"}
DENSE_LOSS = {"dsa_indexer_use_sparse_loss": False}
NO_LOSS = {"dsa_indexer_loss_coeff": 0.0}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
OPERATOR = "operator quantised_indexer"


def one_process(pool, switches, overrides=None, **more):
    (result,) = pool.baseline(STEP, 1, switches=switches, overrides=overrides, num_microbatches=2, **more)
    return result


def same_bits(result, expected):
    assert torch.equal(torch.tensor(result["losses"]), torch.tensor(expected["losses"]))
    assert result["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert torch.equal(result["gradients"][name], gradient), name


def indexers_learn(result):
    of_indexers = [g for name, g in result["gradients"].items() if "indexer" in name]
    assert of_indexers
    assert all(gradient.any() for gradient in of_indexers)


@pytest.mark.parametrize(
    ("switches", "formulas", "overrides"),
    [
        (FP8, "ue8m0", {}),
        pytest.param(PLAIN, "plain", {}, marks=FULL_HERE),
        pytest.param(FP8, "ue8m0", DENSE_LOSS, marks=pytest.mark.full),
        pytest.param(FP8, "ue8m0", RECOMPUTED, marks=pytest.mark.full),
        pytest.param(FP8, "ue8m0", CORE, marks=pytest.mark.full),
        pytest.param(FP8, "ue8m0", {"dsa_indexer_scoring_relu": False}, marks=pytest.mark.full),
    ],
    ids=["ue8m0", "plain", "dense loss", "recomputed", "core attention recomputed", "no relu"],
)
def test_training_is_that_on_the_keys_of_the_formulas(pool, switches, formulas, overrides):
    """Losses and gradients, the indexer's too, use unquantized operands; only the keys differ."""
    result = one_process(pool, switches, overrides)
    assert result["counts"][OPERATOR] >= 8  # four layers, two microbatches
    indexers_learn(result)
    expected = one_process(pool, FULL, overrides, formulas=formulas)
    assert OPERATOR not in expected["counts"]
    same_bits(result, expected)
    assert result["losses"] != one_process(pool, FULL, overrides)["losses"]


@pytest.mark.releases(">=0.16,<0.19", quick=True)
@pytest.mark.parametrize(
    "switches",
    [
        {"dsa_fuse_kl_in_backward": True},
        pytest.param({"use_fused_lightning_indexer_kl_loss": False}, marks=pytest.mark.full),
    ],
    ids=["in backward", "Megatron's"],
)
def test_with_other_forms_of_the_loss(pool, switches):
    result = one_process(pool, {**FP8, **switches})
    indexers_learn(result)
    same_bits(result, one_process(pool, {**FULL, **switches}, formulas="ue8m0"))


def test_without_a_loss_no_scores_are_formed(pool):
    result = one_process(pool, FP8, NO_LOSS)
    assert "operator lightning_indexer" not in result["counts"]
    same_bits(result, one_process(pool, FULL, NO_LOSS, formulas="ue8m0"))


@pytest.mark.releases(">=0.12.1")
@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ({}, {"tp": 2}),
        ({}, {"cp": 2}),
        pytest.param(CORE, {"cp": 2}, marks=pytest.mark.full),
        pytest.param(RECOMPUTED, {"pp": 2}, marks=pytest.mark.full),
    ],
    ids=["TP2", "CP2", "CP2, core attention recomputed", "PP2, recomputed"],
)
def test_layouts(pool, overrides, sizes):
    switches = {**FP8, "context_parallel_size": 2} if "cp" in sizes else FP8
    ranks = pool.run(STEP, 2, switches=switches, overrides=overrides, num_microbatches=2, **sizes)
    expected = one_process(pool, FP8)
    gradients = ranks[0]["gradients"] if "cp" in sizes else put_together(ranks)
    assert all(rank["counts"][OPERATOR] >= 4 for rank in ranks)
    assert_same_gradients(gradients, expected["gradients"])
