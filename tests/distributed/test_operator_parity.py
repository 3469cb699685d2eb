"""Ten steps of the main job with fused operators, or compiled regions, are the training without them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.parity import EP2, PP2, TP2, VPP2, ZERO, Lab, Layout
from tests.distributed.test_context_parallel_parity import cp
from tests.support.memory_events import BESIDE, EVENTS, FUSED_OPERATORS, REGIONS, STARTED

ALL = {"fused_operators": ["all"]}
SMALL = "--num-layers 4"  # what PP2 x VPP2 needs
RECOMPUTED = {"recompute_norm": True, "recompute_activation_function": True}


def layout_of(name: str, ranks: int, flags: str, **more: Any) -> Any:
    layout = Layout(f"fused operators: {name}", ranks, flags, SMALL, switches={**ALL, **more})
    return pytest.param(layout, id=name)


CP2, IN_CP2 = cp(2)
LAYOUTS = [
    layout_of("one process", 1, ""),
    layout_of("TP2+SP x DP2, distributed optimizer, recomputed", 4, f"{TP2} {ZERO}", **RECOMPUTED),
    layout_of(
        "PP2 x VPP2, attention swapped", 2, f"{PP2} {VPP2}", swap_attention=True, swap_attention_min_bytes=0
    ),
    layout_of("EP2, fused DSA, overlapped", 2, EP2, use_fused_dsa=True, moe_alltoall_overlap_comm=True),
    layout_of("TP2+SP, fused DSA, chunks", 2, TP2, use_fused_dsa=True, coc_parallel_num=2),
    layout_of("CP2", 2, CP2, **IN_CP2),
]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_as_one_process(ten_steps: Lab, layout: Layout) -> None:
    outcome = ten_steps.check(layout)
    assert not any(ten_steps.one_process(layout).memory[event] for event in FUSED_OPERATORS.values())
    for event in FUSED_OPERATORS.values():
        assert outcome.memory[event] > 0, event
    for feature in ("recompute_norm", "recompute_activation_function", "swap_attention"):
        assert (outcome.memory[EVENTS[feature.replace("_", "-")]] > 0) == (feature in layout.switches)
    assert (outcome.memory[STARTED] > 0) == ("moe_alltoall_overlap_comm" in layout.switches)


COMPILED = {"compile_regions": True}
ABSORBED = {"use_fused_dsa": True, "use_dsa_absorb": True}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout("compiled regions", 1, "", SMALL, switches=COMPILED),
        Layout("compiled regions, absorbed, TP2+SP", 2, TP2, SMALL, switches={**COMPILED, **ABSORBED}),
        Layout("all that saves host time", 1, "", SMALL, switches={**COMPILED, **ALL, "two_streams": True}),
    ],
    ids=lambda layout: layout.name,
)
def test_compiled_layers_train_as_they_are(ten_steps: Lab, layout: Layout) -> None:
    outcome = ten_steps.check(layout)
    assert not ten_steps.one_process(layout).memory[REGIONS]
    assert outcome.memory[REGIONS] > 0
    assert (outcome.memory[BESIDE] > 0) == ("two_streams" in layout.switches)
