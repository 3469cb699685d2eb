"""The main job with attention on the host is the same training, bit for bit, as the same layout without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.parity import EP2, PP2, PP4, TP2, VPP2, ZERO, Lab, Layout
from tests.distributed.test_memory_parity import assert_same_bits
from tests.support.memory_events import EVENTS

OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
SWAP = {
    "swap_attention": True,
    "swap_attention_min_bytes": 0,
    "swap_modules": "input_norm,self_attention,post_attention_norm",
}
RECOMPUTE = {"recompute_activation_function": True, "recompute_norm": True}
SELECTIVE = "--recompute-granularity selective --recompute-modules"


def layout_of(name: str, ranks: int, flags: str, switches: Any = None, model: str = "") -> Any:
    return pytest.param(Layout(name, ranks, flags, model=model, switches=switches or {}), id=name)


LAYOUTS = [
    layout_of("PP2", 2, PP2),
    layout_of("PP4 x VPP2", 4, f"{PP4} {VPP2}"),
    layout_of("PP4 x VPP2, norms and activations recomputed", 4, f"{PP4} {VPP2}", RECOMPUTE),
    layout_of("TP2+SP, fused DSA", 2, TP2, {"use_fused_dsa": True}),
    layout_of("TP2+SP x PP2", 4, f"{TP2} {PP2}"),
    layout_of(
        "EP2 x DP2, distributed optimizer, overlap, bf16", 4, f"{EP2} {ZERO} {OVERLAP}", model="--bf16"
    ),
    layout_of("PP2, experts and up-projection recomputed", 2, f"{PP2} {SELECTIVE} moe core_attn mla_up_proj"),
    layout_of("MTP: TP2+SP", 2, TP2, model="--mtp-num-layers 1"),
]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_the_same_bits(lab: Lab, layout: Layout) -> None:
    where = layout.world_size, layout.flags, layout.model
    off = lab.run(Layout(f"{layout.name}, without", *where, switches=layout.switches))
    on = lab.run(Layout(f"{layout.name}, swapped", *where, switches={**layout.switches, **SWAP}))
    assert_same_bits(on, off)
    event = EVENTS["swap-attention"]
    assert off.memory[event] == 0
    assert on.memory[event] > 0
