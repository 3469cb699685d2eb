"""Indexers that learn the attention of all layers that they serve: same gradients in every layout.

One process without recomputation is compared with an oracle in ``tests/features/dsa/test_served.py``.
"""

from __future__ import annotations

import pytest

from tests.matrix.test_shared_selections import (
    BLOCK,
    BUBBLES,
    CORE,
    FULL,
    FUSED,
    GLM,
    GLM_STAGES,
    GROUPS,
    HALF,
    MTP,
    QUARTER,
    layout,
    one_process,
    same,
)
from tests.support.model import assert_same_gradients, put_together
from tests.support.releases import FULL_HERE

pytestmark = pytest.mark.releases(">=0.12.1", quick=True)

SERVED = {**FUSED, "dsa_indexer_loss_layers": "served"}
IN_BACKWARD = {**SERVED, "dsa_fuse_kl_in_backward": True}
DENSE = {"dsa_indexer_use_sparse_loss": False}


def differing(result, other):
    """Return names of parameters whose gradients differ."""
    return {
        name for name, gradient in other["gradients"].items() if not gradient.equal(result["gradients"][name])
    }


def test_only_indexers_that_serve_other_layers_learn_differently(pool):
    own, served = one_process(pool, GLM, FUSED), one_process(pool, GLM, SERVED)
    assert own["losses"] == served["losses"]
    layers = {name.split(".")[2] for name in differing(served, own)}
    assert all(".indexer." in name for name in differing(served, own))
    assert layers == {"2", "6"}  # numbered from 0: layers 3 and 7 serve the layers above them


@FULL_HERE
@pytest.mark.releases(">=0.16,<0.19", quick=True)
def test_the_loss_in_backward_has_the_same_gradients(pool):
    expected = one_process(pool, QUARTER, SERVED)
    same(one_process(pool, QUARTER, IN_BACKWARD), expected, 1e-5)
    same(one_process(pool, {**QUARTER, **CORE}, IN_BACKWARD), expected, 1e-5)


@pytest.mark.parametrize(
    ("sharing", "recompute", "loss"),
    [
        pytest.param(GLM, FULL, {}, marks=FULL_HERE),
        pytest.param(QUARTER, GROUPS, {}, marks=FULL_HERE),
        pytest.param(QUARTER, BLOCK, {}, marks=FULL_HERE),
        (QUARTER, CORE, {}),
        (QUARTER, FULL, DENSE),
        pytest.param(HALF, CORE, DENSE, marks=FULL_HERE),
    ],
    ids=["full", "groups", "block", "core", "full, all keys", "core, all keys"],
)
def test_recomputed_layers_have_the_same_bits(pool, sharing, recompute, loss):
    expected = one_process(pool, {**sharing, **loss}, SERVED)
    result = one_process(pool, {**sharing, **recompute, **loss}, SERVED)
    assert result["selected"] > expected["selected"], "nothing was recomputed"
    assert not differing(result, expected)


@pytest.mark.parametrize(
    ("sharing", "overrides", "sizes", "switches"),
    [
        (QUARTER, {}, {"pp": 2}, {}),
        pytest.param(GLM, {**GLM_STAGES, **FULL}, {"pp": 2}, {}, marks=FULL_HERE),
        pytest.param(HALF, GROUPS, {"pp": 2, "vpp": 2}, {}, marks=FULL_HERE),
        (QUARTER, {}, {"tp": 2}, {}),
        pytest.param(QUARTER, CORE, {"tp": 2}, {}, marks=FULL_HERE),
        pytest.param(QUARTER, DENSE, {"tp": 2}, {}, marks=FULL_HERE),
        (QUARTER, {}, {"cp": 2}, {}),
        pytest.param(QUARTER, CORE, {"cp": 2}, {}, marks=FULL_HERE),
        pytest.param(QUARTER, DENSE, {"cp": 2}, {}, marks=FULL_HERE),
        pytest.param(HALF, FULL, {"pp": 2, "vpp": 2}, {"recompute_in_advance": True}, marks=FULL_HERE),
    ],
    ids=[
        "PP2",
        "GLM-5.2 on PP2, full",
        "PP2 x VPP2, groups",
        "TP2",
        "TP2, core",
        "TP2, all keys",
        "CP2",
        "CP2, core",
        "CP2, all keys",
        "ahead",
    ],
)
def test_layouts(pool, sharing, overrides, sizes, switches):
    loss = {name: value for name, value in overrides.items() if name in DENSE}
    expected = one_process(pool, {**sharing, **loss}, SERVED)
    switches = {**SERVED, **switches, **({"context_parallel_size": 2} if "cp" in sizes else {})}
    same(layout(pool, 2, {**sharing, **overrides}, switches, **sizes), expected)


@pytest.mark.releases(">=0.12.1")
@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [(FULL, {}), (CORE, {}), ({}, {"tp": 2}), ({}, {"cp": 2}), (FULL, {"pp": 2})],
    ids=["full", "core", "TP2", "CP2", "PP2, full"],
)
def test_warm_up(pool, overrides, sizes):
    stage = {"dsa_stage": "warmup"}
    own = one_process(pool, QUARTER, {**FUSED, **stage})
    expected = one_process(pool, QUARTER, {**SERVED, **stage})
    assert {name.split(".")[2] for name in differing(expected, own)} == {"0", "4"}
    switches = {**SERVED, **stage, **({"context_parallel_size": 2} if "cp" in sizes else {})}
    ranks = 2 if sizes else 1
    result = layout(pool, ranks, {**QUARTER, **overrides}, switches, **sizes)
    assert expected["gradients"].keys() == result["gradients"].keys()
    assert_same_gradients(result["gradients"], expected["gradients"], 1e-4)


@pytest.mark.releases(">=0.12.1")
@pytest.mark.parametrize("overrides", [{}, FULL], ids=["plain", "full"])
def test_multi_token_prediction(pool, overrides):
    sharing = {**HALF, **MTP, "dsa_indexer_share_for_mtp": True}
    expected, own = one_process(pool, sharing, SERVED), one_process(pool, sharing, FUSED)
    assert any(name.startswith("mtp.layers.0") for name in differing(expected, own))
    same(one_process(pool, {**sharing, **overrides}, {**SERVED, "mtp_recompute": True}), expected)


@pytest.mark.releases(">=0.19", quick=True)
def test_a_repeated_layer_of_multi_token_prediction(pool):
    repeated = {**HALF, **MTP, "mtp_use_repeated_layer": True, "dsa_indexer_share_for_mtp": True}
    expected, own = one_process(pool, repeated, SERVED), one_process(pool, repeated, FUSED)
    assert any(name.startswith("mtp.") for name in differing(expected, own))
    same(one_process(pool, {**repeated, **FULL}, {**SERVED, "mtp_recompute": True}), expected)


@pytest.mark.releases(">=0.14")
@pytest.mark.parametrize(
    ("recompute", "sharing", "switches", "sizes"),
    [
        (CORE, QUARTER, {}, {}),
        (FULL, QUARTER, {}, {}),
        pytest.param(FULL, HALF, BUBBLES, {"pp": 2, "vpp": 2}, marks=pytest.mark.full),
    ],
    ids=["core", "full", "PP2 x VPP2, full in bubbles"],
)
def test_pairs_of_forward_and_backward(pool, recompute, sharing, switches, sizes):
    ranks = 2 * sizes.get("pp", 1)
    expected = layout(pool, ranks, sharing, SERVED, ep=2, **sizes)
    paired = {**SERVED, "moe_fb_overlap": True, **switches}
    same(layout(pool, ranks, {**sharing, **recompute}, paired, ep=2, **sizes), expected)


@pytest.mark.releases(">=0.16")
@pytest.mark.parametrize(
    ("ranks", "sizes", "stage", "overrides"),
    [
        (2, {"pp": 2}, "sparse", FULL),
        (2, {"cp": 2}, "sparse", FULL),
        (1, {}, "warmup", {}),
        (2, {"cp": 2}, "warmup", {}),
    ],
    ids=["PP2", "CP2", "warm-up", "CP2, warm-up"],
)
def test_packed_documents(pool, ranks, sizes, stage, overrides):
    step = "tests.features.attention.packs.documents:scripted_step"
    shared = {**HALF, "dsa_indexer_n_heads": 16}
    switches = {"dsa_indexer_loss_layers": "served", "dsa_stage": stage}
    (alone,) = pool.run(step, 1, alone=True, from_tokens=True, overrides=shared, switches=switches)
    packed = pool.run(
        step, ranks, from_tokens=True, overrides={**shared, **overrides}, switches=switches, **sizes
    )
    packed = packed[:1] if "cp" in sizes else packed
    assert_same_gradients(put_together(packed), alone["gradients"], 2e-5)


@pytest.mark.releases(">=0.16,<0.19", quick=True)
@pytest.mark.parametrize("recompute", [{}, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("form", ["forward", "indexer"])
def test_a_fork_that_carries_selections_itself_is_one_message(pool, form, recompute):
    fork = "tests.matrix.sharing_steps:error_of_fork"
    (error,) = pool.run(fork, 1, form=form, switches=SERVED, overrides={**QUARTER, **recompute})
    assert "--dsa-indexer-loss-layers served: layer " in error
    assert "carries selections itself; omit the flag" in error
    (error,) = pool.run(fork, 1, form="forward", switches=FUSED, overrides={**QUARTER, **recompute})
    assert error == ""
