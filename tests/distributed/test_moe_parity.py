"""The main job with all MoE features at once, and with features of other kinds, is the same training."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.parity import EP2, PP2, SHALLOW, TP2, VPP2, ZERO, Lab, Layout
from tests.features.moe.balanced_experts.cases import ALWAYS
from tests.support.memory_events import GROUPED, MOVED, PERMUTED, STARTED

ALL = {**ALWAYS, "moe_alltoall_overlap_comm": True, "moe_grouped_gemm": True, "moe_permute_fusion": True}
REDUCE = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"


def together(name: str, ranks: int, flags: str, model: str = "", **more: Any) -> Layout:
    """A layout with overlapped all-to-alls, moved, grouped experts and fused permutation."""
    flags = f"{flags} --moe-permute-fusion --moe-grouped-gemm"
    return Layout(f"all MoE features: {name}", ranks, flags, model, switches={**ALL, **more})


LAYOUTS = (
    together("EP2 x DP2, distributed optimizer, overlap", 4, f"{EP2} {ZERO} {REDUCE}", SHALLOW),
    together("PP2 x VPP2 x EP2", 4, f"{PP2} {VPP2} {EP2}"),
    together("TP2+SP as EP2, chunks", 2, TP2, moe_tp_extend_ep=True, use_ascend_coc=True, coc_parallel_num=2),
    together("EP2, fused DSA", 2, EP2, use_fused_dsa=True),
    together("EP2, activations recomputed", 2, EP2, recompute_activation_function=True),
    together("EP2, attention swapped", 2, EP2, swap_attention=True),
    together("EP2, norms recomputed", 2, EP2, recompute_norm=True),
    together("EP2, optimizer swapped", 2, f"{EP2} {ZERO}", swap_optimizer=True),
)
FULL = [pytest.param(layout, marks=pytest.mark.full, id=layout.name) for layout in LAYOUTS[1:]]


@pytest.mark.parametrize("layout", [pytest.param(LAYOUTS[0], id=LAYOUTS[0].name), *FULL])
def test_layout_trains_as_one_process(lab: Lab, layout: Layout) -> None:
    outcome = lab.check(layout)
    assert outcome.memory[MOVED] > 0
    assert outcome.memory[STARTED] > 0
    assert outcome.memory[GROUPED] > 0
    assert outcome.memory[PERMUTED] > 0
