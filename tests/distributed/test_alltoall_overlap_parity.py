"""The main job with overlapped all-to-alls is the same training as without."""

from __future__ import annotations

import pytest

from tests.distributed.parity import EP2, HEADING, PP2, TP2, VPP2, ZERO, Bounds, Lab, Layout
from tests.support.figures import tell
from tests.support.memory_events import STARTED

ON = {"moe_alltoall_overlap_comm": True}
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BESIDE_STOCK = Bounds(loss=1e-6, grad_norm=1e-6, first_gradient=1e-6, last_gradient=5e-5, update=5e-4)
"""Beside the same layout in stock's way: the order of a few sums is all that differs."""

LAYOUTS = (
    Layout("overlapped all-to-alls: TP2+SP x EP2", 2, f"{TP2} {EP2} --expert-tensor-parallel-size 1"),
    Layout("overlapped all-to-alls: PP2 x EP2", 4, f"{PP2} {EP2}"),
    Layout("overlapped all-to-alls: PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}"),
    Layout("overlapped all-to-alls: EP2 x DP2, distributed optimizer, overlap", 4, f"{EP2} {ZERO} {OVERLAP}"),
    Layout("overlapped all-to-alls, MTP: EP2", 2, EP2, model="--mtp-num-layers 1"),
    Layout("overlapped all-to-alls, all layers recomputed: EP2", 2, f"{EP2} {FULL_RECOMPUTE}"),
)

pytestmark = pytest.mark.full


def test_beside_stock(lab: Lab) -> None:
    """Losses, gradients and updates of five steps."""
    layout = Layout("overlapped all-to-alls: EP2, beside stock", 2, EP2, switches=ON)
    stock, overlapped = lab.run(Layout("stock", 2, EP2)), lab.run(layout)
    assert stock.memory[STARTED] == 0
    assert overlapped.memory[STARTED] > 0
    comparison = lab.compare(layout, overlapped, stock)
    tell(HEADING, str(comparison))
    assert not comparison.violations(BESIDE_STOCK)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_trains_as_one_process(lab: Lab, layout: Layout) -> None:
    layout = Layout(layout.name, layout.world_size, layout.flags, model=layout.model, switches=ON)
    assert lab.check(layout).memory[STARTED] > 0
