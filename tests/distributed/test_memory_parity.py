"""The main job in bfloat16 with memory features is the same training, bit for bit, as without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.distributed.memory_events import EVENTS
from tests.distributed.parity import EP2, PP2, PP4, TP2, VPP2, ZERO, Lab, Layout, Outcome

BF16 = "--bf16"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
REUSE = {"reuse_fp32_param": True}
RECOMPUTE = {"recompute_activation_function": True, "recompute_norm": True}


def layout_of(name: str, ranks: int, flags: str, switches: Mapping[str, Any], full: bool = True) -> Any:
    marks = [pytest.mark.full] if full else []
    return pytest.param(Layout(name, ranks, flags, model=BF16, switches=switches), id=name, marks=marks)


LAYOUTS = [
    layout_of("reuse, recompute: PP4 x VPP2", 4, f"{PP4} {VPP2} {ZERO}", {**REUSE, **RECOMPUTE}, full=False),
    layout_of("reuse: PP4 x VPP2, overlap", 4, f"{PP4} {VPP2} {ZERO} {OVERLAP}", REUSE),
    layout_of("reuse: PP2 x DP2, overlap", 4, f"{PP2} {ZERO} {OVERLAP}", REUSE),
    layout_of("reuse: PP2, without the distributed optimizer", 2, PP2, REUSE),
    layout_of("reuse: EP2", 2, EP2, REUSE),
    layout_of("reuse: EP2 x DP2, distributed optimizer", 4, f"{EP2} {ZERO}", REUSE),
    layout_of("reuse: TP2+SP x DP2, distributed optimizer", 4, f"{TP2} {ZERO}", REUSE),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_the_same_bits(lab: Lab, layout: Layout) -> None:
    plain = Layout(f"{layout.name}, without", layout.world_size, layout.flags, layout.model)
    off, on = lab.run(plain), lab.run(layout)
    assert_same_bits(on, off)
    for name, event in EVENTS.items():
        assert off.memory[event] == 0
        assert (on.memory[event] > 0) >= (name.replace("-", "_") in layout.switches), name


def assert_same_bits(on: Outcome, off: Outcome) -> None:
    for what in ("lm_loss", "grad_norm"):
        assert [record[what] for record in on.records] == [record[what] for record in off.records], what
    for what in ("first_gradients", "last_gradients", "weights"):
        ours, theirs = getattr(on, what), getattr(off, what)
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not ours[name].equal(theirs[name])] == [], what
