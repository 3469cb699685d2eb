"""The main job whose hot experts' weights travel is the same training as one process."""

from __future__ import annotations

import pytest

from tests.distributed.parity import EP2, PP2, SHALLOW, TP2, ZERO, Lab, Layout
from tests.features.moe.balanced_experts.cases import ALWAYS
from tests.support.memory_events import MOVED

OVERLAP = f"{ZERO} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
"""Buckets start once a fixed number of gradients is there: every forward has as many, whatever moves."""
ONE = {**ALWAYS, "balanced_moe_hot_expert_num": 1}
ETP1 = "--expert-tensor-parallel-size 1"

LAYOUTS = (
    Layout(
        "hot experts travel: EP2, distributed optimizer, overlap",
        2,
        f"{EP2} {ZERO} {OVERLAP}",
        SHALLOW,
        switches=ALWAYS,
    ),
    Layout("hot experts travel: EP2, expert-DP2, overlap", 4, f"{EP2} {ZERO} {OVERLAP}", switches=ALWAYS),
    Layout("hot experts travel: EP2, expert-DP2", 4, f"{EP2} --overlap-grad-reduce", switches=ONE),
    Layout("hot experts travel: PP2, EP2, overlap", 4, f"{PP2} {EP2} {ZERO} {OVERLAP}", switches=ALWAYS),
    Layout("hot experts travel: TP2+SP as EP2", 2, f"{TP2} {EP2} {ETP1}", switches=ALWAYS),
    Layout(
        "hot experts travel, recomputed: EP2",
        2,
        f"{EP2} --recompute-granularity selective --recompute-modules moe",
        switches=ALWAYS,
    ),
    Layout(
        "hot experts travel, activations recomputed: EP2",
        2,
        EP2,
        switches={**ALWAYS, "recompute_activation_function": True},
    ),
    Layout("hot experts travel, MTP: EP2", 2, EP2, model="--mtp-num-layers 1", switches=ALWAYS),
)
FULL = [pytest.param(layout, marks=pytest.mark.full, id=layout.name) for layout in LAYOUTS[1:]]


@pytest.mark.parametrize("layout", [pytest.param(LAYOUTS[0], id=LAYOUTS[0].name), *FULL])
def test_layout_trains_as_one_process(lab: Lab, layout: Layout) -> None:
    outcome = lab.check(layout)
    assert outcome.memory[MOVED] > 0
