"""Models train the same with overlapped all-to-alls, in every layout and with other features."""

from __future__ import annotations

import pytest

from tests.features.moe.alltoall_overlap.test_layer import CASES
from tests.support.model import assert_same_gradients, losses_of

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MEMORY = {
    "recompute_activation_function": True,
    "recompute_norm": True,
    "recompute_verify": True,
    "swap_attention": True,
}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        pytest.param(2, {"num_microbatches": 3, "overrides": {"num_layers": 3}}, marks=pytest.mark.full),
        (2, {"beside": MEMORY}),
        pytest.param(2, {"tp": 2, "ddp": {"overlap_grad_reduce": True}}, marks=pytest.mark.full),
        pytest.param(2, {"beside": {"use_fused_dsa": True}}, marks=pytest.mark.full),
        pytest.param(2, {"overrides": RECOMPUTED}, marks=pytest.mark.full),
        pytest.param(2, {"num_microbatches": 2, "ddp": OVERLAPPED}, marks=pytest.mark.full),
        pytest.param(
            4, {"pp": 2, "num_microbatches": 4, "overrides": {"num_layers": 4}}, marks=pytest.mark.full
        ),
        pytest.param(
            4,
            {"pp": 2, "vpp": 2, "num_microbatches": 4, "overrides": {"num_layers": 4}},
            marks=pytest.mark.full,
        ),
    ],
    ids=(
        "three microbatches",
        "memory features",
        "TP2+SP",
        "fused DSA",
        "all layers recomputed",
        "distributed optimizer, overlap",
        "PP2",
        "PP2 x VPP2",
    ),
)
def test_losses_and_gradients(pool, ranks, arguments):
    arguments = dict(arguments)
    beside = arguments.pop("beside", {})
    off, on = (
        pool.run(f"{CASES}:whole_model", ranks, ep=2, etp=1, switches={**beside, **switch}, **arguments)
        for switch in ({}, {"moe_alltoall_overlap_comm": True})
    )
    for before, after in zip(off, on, strict=True):
        assert before["launched"] == 0
        assert losses_of(after) == losses_of(before)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
    assert sum(rank["launched"] for rank in on) > 0
