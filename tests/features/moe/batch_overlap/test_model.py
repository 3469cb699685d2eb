"""Models train the same with overlapped halves, in every layout and with other features."""

from __future__ import annotations

import pytest

from tests.features.moe.alltoall_overlap.test_layer import CASES
from tests.features.moe.alltoall_overlap.test_model import MEMORY, OVERLAPPED, RECOMPUTED
from tests.features.moe.batch_overlap.layer_in_halves import ALWAYS, MEASURED
from tests.support.model import assert_same_gradients, losses_of

FUSED = {"moe_grouped_gemm": True, "moe_permute_fusion": True}
WHOLE_EXPERTS = {"expert_tensor_parallel_size": 1}
INTERLEAVED = {"pp": 2, "vpp": 2, "num_microbatches": 4, "overrides": {"num_layers": 4}}
RUNS = {
    # name: ranks, arguments, other switches
    "three microbatches": (2, {"num_microbatches": 3, "overrides": {"num_layers": 3}}, {}),
    "memory features": (2, {}, MEMORY),
    "grouped experts, fused permutation": (2, {"overrides": FUSED}, FUSED),
    "overlap of the whole": (2, {"overrides": FUSED}, {**FUSED, "moe_alltoall_overlap_comm": True}),
    "TP2+SP": (2, {"tp": 2, "overrides": WHOLE_EXPERTS, "ddp": {"overlap_grad_reduce": True}}, {}),
    "TP2+SP, chunks": (
        2,
        {"tp": 2, "overrides": WHOLE_EXPERTS},
        {"use_ascend_coc": True, "coc_parallel_num": 2},
    ),
    "fused DSA": (2, {}, {"use_fused_dsa": True}),
    "all layers recomputed": (2, {"overrides": RECOMPUTED}, {}),
    "distributed optimizer, overlap": (2, {"num_microbatches": 2, "ddp": OVERLAPPED}, {}),
    "PP2 x VPP2": (4, INTERLEAVED, {}),
}
QUICK = list(RUNS)[:1]


@pytest.mark.full
def test_what_is_measured_trains_the_same(pool):
    """Training is the same with the layers' own choice, whichever this machine makes."""
    off, on = (
        pool.run(f"{CASES}:whole_model", 2, ep=2, etp=1, num_microbatches=2, switches=switch)
        for switch in ({}, MEASURED)
    )
    for before, after in zip(off, on, strict=True):
        assert losses_of(after) == losses_of(before)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
        assert after["launched"] > 0  # at least in the measurement


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in RUNS]
)
def test_losses_and_gradients(pool, name):
    ranks, arguments, beside = RUNS[name]
    off, on = (
        pool.run(f"{CASES}:whole_model", ranks, ep=2, etp=1, switches={**beside, **switch}, **arguments)
        for switch in ({}, ALWAYS)
    )
    for before, after in zip(off, on, strict=True):
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
    started = [sum(rank["launched"] for rank in each) for each in (off, on)]
    assert started[0] == 0 or "overlap of the whole" in name
    assert started[1] > 0
    assert started[1] == 2 * started[0] or started[0] == 0
