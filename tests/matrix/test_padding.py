"""Sequences that ranks do not divide train as on one process, whatever the padding rows hold."""

from __future__ import annotations

import pytest
import torch

from tests.features.attention.packs import test_routers as packs
from tests.support.model import assert_same_gradients, put_together

pytestmark = pytest.mark.releases(">=0.16", quick=True)

STEP = "tests.matrix.padded_steps:step"
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}
# With it Megatron weights a rank's router losses by its own tokens, padding or not.
PER_TOKEN = {
    "calculate_per_token_loss": True,
    "moe_router_load_balancing_type": "none",
    "moe_z_loss_coeff": None,
}
TWO_SELECT = {"num_layers": 4, "moe_layer_freq": [0, 1, 0, 1], "dsa_indexer_topk_freq": 2}
CASES = {
    "CP2": (2, {"cp": 2}, {}),
    "CP2, run by run": (2, {"cp": 2, "by_run": True}, {}),
    "TP2+SP, per token": (2, {"tp": 2}, PER_TOKEN),
    "CP2, per token": (2, {"cp": 2}, PER_TOKEN),
    "TP2+SP, dense indexer loss": (2, {"tp": 2}, {"dsa_indexer_use_sparse_loss": False}),
    "CP2, shared selections": (2, {"cp": 2}, TWO_SELECT),
    "TP2+SP, shared selections": (2, {"tp": 2}, TWO_SELECT),
    "TP2+SP": (2, {"tp": 2}, {}),
    "CP2, MTP": (2, {"cp": 2}, MTP),
    "TP2+SP, MTP": (2, {"tp": 2}, MTP),
    "CP2 x TP2+SP": (4, {"cp": 2, "tp": 2}, {}),
    "CP4": (4, {"cp": 4}, {}),
}
QUICK = ("TP2+SP",)


@pytest.mark.parametrize(
    ("name", "garbage"),
    [
        pytest.param(
            name,
            garbage,
            id=f"{name}, {'garbage' if garbage else 'zeros'}",
            marks=() if garbage and name in QUICK else pytest.mark.full,
        )
        for name in CASES
        for garbage in (False, True)
    ],
)
def test_a_step_is_that_of_one_process(pool, note, name, garbage):
    """Compares losses of the model, routers and indexers, tokens per expert, and all gradients."""
    ranks, sizes, overrides = CASES[name]
    note.begins(name, "pad-sequences")
    (alone,) = pool.baseline(STEP, 1, overrides=overrides)
    results = pool.run(STEP, ranks, overrides=overrides, garbage=garbage, **sizes)
    tp = sizes.get("tp", 1)
    losses = torch.tensor([each["losses"] for each in results[::tp]]).sum(0)
    torch.testing.assert_close(losses, torch.tensor(alone["losses"]), rtol=1e-6, atol=0)
    assert alone["tokens"]
    assert results[0]["tokens"] == alone["tokens"]
    assert results[0]["indexer loss"] == pytest.approx(alone["indexer loss"], rel=1e-6)
    assert sum(bool(gradient.any()) for gradient in alone["gradients"].values()) > 25
    assert_same_gradients(put_together(results[:tp]), alone["gradients"], 1e-5)
    note.trained(results)


@pytest.mark.releases(">=0.16")
def test_rows_of_no_document_change_no_gradient(pool):
    """Routers and indexers learn only from tokens; 0.19 computes its own indexer loss."""
    absent, between = (pool.run(packs.CASE, 1, gaps=gaps)[0] for gaps in (packs.ABSENT, packs.BETWEEN))
    assert any("indexer" in name for name in absent["gradients"])
    assert_same_gradients(between["gradients"], absent["gradients"], 1e-5)
