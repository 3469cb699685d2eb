from __future__ import annotations

import itertools

import pytest
import torch

from tests.features.attention.job import assert_same_gradients

CASES = "tests.features.attention.fused_cases"
PARTS = (
    "use_dsa_absorb",
    "use_fused_lightning_indexer",
    "use_fused_sparse_flash_attention",
    "use_fused_lightning_indexer_kl_loss",
)
FUSED = {"use_fused_dsa": True}
IN_BACKWARD = {"use_fused_dsa": True, "dsa_fuse_kl_in_backward": True}
SHORT = {"dsa_indexer_topk": 20}  # the sequence is no longer than that
DENSE_LOSS = {"dsa_indexer_use_sparse_loss": False}


def step(pool, switches=None, overrides=None, mode="train"):
    (result,) = pool.run(f"{CASES}:one_step", 1, switches=switches, overrides=overrides, mode=mode)
    return result


@pytest.fixture(scope="module")
def stock(pool):
    return {name: step(pool, overrides=overrides) for name, overrides in MODELS.items()}


MODELS = {
    "sparse loss": {},
    "dense loss": DENSE_LOSS,
    "short": SHORT,
    "short, dense loss": SHORT | DENSE_LOSS,
}


def assert_same(ours, theirs, rtol=1e-4):
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    torch.testing.assert_close(ours["tracked"], theirs["tracked"], rtol=1e-4, atol=1e-6)
    assert_same_gradients(ours["gradients"], theirs["gradients"], rtol)


COMBINATIONS = [chosen for chosen in itertools.product((False, True), repeat=4) if any(chosen)]


@pytest.mark.parametrize("chosen", COMBINATIONS, ids=str)
def test_every_combination_of_parts_trains_as_megatron_does(pool, stock, chosen):
    switches = dict(zip(PARTS, chosen, strict=True))
    ours = step(pool, switches)
    assert_same(ours, stock["sparse loss"])
    # Megatron's own pieces run where ours are off, and nowhere else: once a layer.
    _, _, attention, kl_loss = chosen
    assert ours["counts"]["unfused_dsa_fn"] == (0 if attention else 2)
    assert ours["counts"]["compute_dsa_indexer_loss"] == (0 if kl_loss else 2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("switches", [FUSED, IN_BACKWARD, FUSED | {"use_dsa_absorb": False}], ids=str)
def test_all_parts_on_every_form_of_the_loss(pool, stock, model, switches):
    if "dsa_fuse_kl_in_backward" in switches and "dense" in model:
        pytest.skip("refused before training starts")
    ours = step(pool, switches, MODELS[model])
    assert_same(ours, stock[model])
    assert ours["counts"]["unfused_dsa_fn"] == ours["counts"]["compute_dsa_indexer_loss"] == 0
