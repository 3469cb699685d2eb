"""The main job in bfloat16 with memory features is the same training, bit for bit, as without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.distributed.parity import EP2, PP2, PP4, TP2, VPP2, ZERO, Lab, Layout, Outcome
from tests.support.memory_events import EVENTS

BF16 = "--bf16"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
REUSE = {"reuse_fp32_param": True}
SWAP = {"swap_optimizer": True, "swap_optimizer_times": 4}
# All that combine: --swap-optimizer leaves nothing for --reuse-fp32-param and --virtual-optimizer to do.
ACTIVATIONS = {
    "recompute_activation_function": True,
    "recompute_norm": True,
    "swap_attention": True,
    "swap_attention_min_bytes": 0,
}
WITH_REUSE = {**ACTIVATIONS, **REUSE, "virtual_optimizer": ["all"]}
WITH_SWAP = {**ACTIVATIONS, **SWAP}


def layout_of(name: str, ranks: int, flags: str, switches: Mapping[str, Any]) -> Any:
    return pytest.param(Layout(name, ranks, flags, model=BF16, switches=switches), id=name)


LAYOUTS = [
    layout_of("all with reuse: PP4 x VPP2", 4, f"{PP4} {VPP2} {ZERO}", WITH_REUSE),
    layout_of("all with swap: PP4 x VPP2", 4, f"{PP4} {VPP2} {ZERO}", WITH_SWAP),
    layout_of("all with swap: PP2 x DP2, overlap", 4, f"{PP2} {ZERO} {OVERLAP}", WITH_SWAP),
    layout_of("all with reuse, fused DSA: TP2+SP", 2, f"{TP2} {ZERO}", {**WITH_REUSE, "use_fused_dsa": True}),
    layout_of("swap: PP4 x VPP2, overlap", 4, f"{PP4} {VPP2} {ZERO} {OVERLAP}", SWAP),
    layout_of("swap: EP2 x DP2, distributed optimizer", 4, f"{EP2} {ZERO}", SWAP),
    layout_of("swap: TP2+SP x DP2, distributed optimizer", 4, f"{TP2} {ZERO}", SWAP),
    layout_of("swap: PP2, without the distributed optimizer", 2, PP2, SWAP),
    layout_of("reuse: PP4 x VPP2, overlap", 4, f"{PP4} {VPP2} {ZERO} {OVERLAP}", REUSE),
    layout_of("reuse: PP2 x DP2, overlap", 4, f"{PP2} {ZERO} {OVERLAP}", REUSE),
    layout_of("reuse: PP2, without the distributed optimizer", 2, PP2, REUSE),
    layout_of("reuse: EP2", 2, EP2, REUSE),
    layout_of("reuse: EP2 x DP2, distributed optimizer", 4, f"{EP2} {ZERO}", REUSE),
    layout_of("reuse: TP2+SP x DP2, distributed optimizer", 4, f"{TP2} {ZERO}", REUSE),
]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_the_same_bits(lab: Lab, layout: Layout) -> None:
    fused = {name: value for name, value in layout.switches.items() if name == "use_fused_dsa"}
    plain = Layout(f"{layout.name}, without", layout.world_size, layout.flags, layout.model, switches=fused)
    off, on = lab.run(plain), lab.run(layout)
    assert_same_bits(on, off)
    for name, event in EVENTS.items():
        assert off.memory[event] == 0
        assert (on.memory[event] > 0) == (name.replace("-", "_") in layout.switches), name


def assert_same_bits(on: Outcome, off: Outcome) -> None:
    for what in ("lm_loss", "grad_norm"):
        assert [record[what] for record in on.records] == [record[what] for record in off.records], what
    for what in ("first_gradients", "last_gradients", "weights"):
        ours, theirs = getattr(on, what), getattr(off, what)
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not ours[name].equal(theirs[name])] == [], what
