"""The main job with grouped experts is the same training as one process with sequential ones."""

from __future__ import annotations

import pytest

from tests.distributed.parity import EP2, PP2, TP2, ZERO, Lab, Layout

ON = {"moe_grouped_gemm": True}
FLAG = "--moe-grouped-gemm"
OVERLAP = f"{ZERO} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
MTP = "--mtp-num-layers 1"

LAYOUTS = (
    Layout("grouped experts, MTP: PP2", 2, f"{PP2} {FLAG}", model=MTP, switches=ON),
    Layout("grouped experts: TP2+SP, EP2", 4, f"{TP2} {EP2} {FLAG}", switches=ON),
    Layout("grouped experts: PP2, EP2, DP2, overlapped", 4, f"{PP2} {EP2} {OVERLAP} {FLAG}", switches=ON),
    Layout(
        "grouped experts, fused DSA, recomputed activation: EP2",
        2,
        f"{EP2} {FLAG}",
        switches={**ON, "use_fused_dsa": True, "recompute_activation_function": True},
    ),
)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_trains_as_one_process(lab: Lab, layout: Layout) -> None:
    lab.check(layout)
