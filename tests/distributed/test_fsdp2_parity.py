"""The main job with dense weights sharded by FSDP2 is the same training as with DDP in the same layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.parity import EP2, PP2, SHALLOW, TP2, VPP2, Bounds, Lab, Layout
from tests.support.memory_events import GATHERED

ON = {"use_torch_fsdp2": True}
EXACT = Bounds(loss=1e-6, grad_norm=1e-6, first_gradient=1e-6, last_gradient=1e-4, update=1e-3)
"""Nothing but the order of sums differs; one sign of an indexer's product near zero may make the last two."""
PER_TOKEN = "--calculate-per-token-loss"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
INSIDE_LAYERS = {
    "recompute_norm": True,
    "recompute_activation_function": True,
    "moe_alltoall_overlap_comm": True,
}
MTP = f"{SHALLOW} --mtp-num-layers 1"


def layout_of(
    name: str, ranks: int, flags: str = "", model: str = SHALLOW, quick: bool = False, **switches: Any
) -> Any:
    layout = Layout(name, ranks, flags, model, switches={"use_fused_dsa": True, **switches})
    return pytest.param(layout, id=name, marks=() if quick else pytest.mark.full)


LAYOUTS = [
    layout_of("DP2, loss per token", 2, PER_TOKEN, quick=True),
    layout_of("TP2+SP x DP2", 4, TP2),
    layout_of("TP2+SP x EP2 x DP2", 4, f"{TP2} {EP2} --expert-tensor-parallel-size 1"),
    layout_of("PP2 x DP2, MTP", 4, PP2, MTP),
    layout_of("EP2, MTP", 2, EP2, MTP),
    layout_of("EP2 x EDP2", 4, EP2),
    layout_of("PP2 x EP2", 4, f"{PP2} {EP2}", quick=True),
    layout_of("PP2 x VPP2 x EP2, loss per token", 4, f"{PP2} {VPP2} {EP2} {PER_TOKEN}"),
    layout_of("EP2, layers recomputed", 2, f"{EP2} {RECOMPUTE}"),
    layout_of("EP2, outputs recomputed, all-to-alls overlapped", 2, EP2, **INSIDE_LAYERS),
    layout_of("CP2 x DP2", 4, "--context-parallel-size 2", context_parallel_size=2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_as_with_ddp(lab: Lab, layout: Layout) -> None:
    with_ddp = lab.run(layout)
    sharded = replace(
        layout,
        name=f"{layout.name}, FSDP2",
        flags=f"{layout.flags} --use-torch-fsdp2",
        switches={**layout.switches, **ON},
    )
    outcome = lab.check(sharded, EXACT, reference=with_ddp)
    assert with_ddp.memory[GATHERED] == 0
    # Five steps of four microbatches, each layer in either direction.
    assert outcome.memory[GATHERED] >= 5 * 4 * 4 * 2
