"""The main job with its tokens in overlapped halves is the same training as without."""

from __future__ import annotations

import pytest

from tests.distributed.parity import EP2, HEADING, PP2, TP2, VPP2, ZERO, Bounds, Lab, Layout
from tests.distributed.test_alltoall_overlap_parity import FULL_RECOMPUTE, OVERLAP
from tests.features.moe.batch_overlap.cases import ALWAYS
from tests.support.figures import tell
from tests.support.memory_events import GROUPED, PERMUTED, STARTED

FUSED = {"moe_grouped_gemm": True, "moe_permute_fusion": True, "use_fused_dsa": True}
BESIDE_STOCK = Bounds(loss=1e-6, grad_norm=1e-6, first_gradient=1e-6, last_gradient=5e-5, update=5e-4)
"""Beside the same layout in stock's way: the order of a few sums is all that differs."""

LAYOUTS = (
    Layout("overlapped halves: TP2+SP x EP2", 2, f"{TP2} {EP2} --expert-tensor-parallel-size 1"),
    Layout("overlapped halves: PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}"),
    Layout("overlapped halves: EP2 x DP2, distributed optimizer, overlap", 4, f"{EP2} {ZERO} {OVERLAP}"),
    Layout("overlapped halves, MTP: EP2", 2, EP2, model="--mtp-num-layers 1"),
    Layout("overlapped halves, all layers recomputed: EP2", 2, f"{EP2} {FULL_RECOMPUTE}"),
    Layout(
        "overlapped halves, grouped experts, fused permutation, fused DSA: EP2",
        2,
        f"{EP2} --moe-permute-fusion --moe-grouped-gemm",
        switches=FUSED,
    ),
)

pytestmark = pytest.mark.full


def test_beside_stock(lab: Lab) -> None:
    """Losses, gradients and updates of five steps."""
    layout = Layout("overlapped halves: EP2, beside stock", 2, EP2, switches=ALWAYS)
    stock, halves = lab.run(Layout("stock", 2, EP2)), lab.run(layout)
    assert stock.memory[STARTED] == 0
    assert halves.memory[STARTED] > 0
    comparison = lab.compare(layout, halves, stock)
    tell(HEADING, str(comparison))
    assert not comparison.violations(BESIDE_STOCK)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_trains_as_one_process(lab: Lab, layout: Layout) -> None:
    switches = {**layout.switches, **ALWAYS}
    outcome = lab.check(Layout(layout.name, layout.world_size, layout.flags, layout.model, switches=switches))
    assert outcome.memory[STARTED] > 0
    for event, switch in ((GROUPED, "moe_grouped_gemm"), (PERMUTED, "moe_permute_fusion")):
        assert (outcome.memory[event] > 0) == (switch in switches), event
