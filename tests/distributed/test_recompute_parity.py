"""The main job with activation functions and norms recomputed is the same training as one process without."""

from __future__ import annotations

import pytest

from tests.distributed.parity import EP2, PP2, PP4, TP2, VPP2, ZERO, Lab, Layout

ACTIVATIONS = {"recompute_activation_function": True}
BOTH = {**ACTIVATIONS, "recompute_norm": True, "recompute_verify": True}
SOME = {**BOTH, "recompute_activation_function_num_layers": 1, "recompute_norm_num_layers": 1}
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"

LAYOUTS = (
    Layout("recomputed: PP4 x VPP2", 4, f"{PP4} {VPP2}", switches=BOTH),
    Layout("recomputed: TP2+SP", 2, TP2, switches=BOTH),
    Layout("recomputed: PP2", 2, PP2, switches=BOTH),
    Layout("recomputed in some layers: PP2 x VPP2", 2, f"{PP2} {VPP2}", switches=SOME),
    Layout("recomputed: EP2", 2, EP2, switches=BOTH),
    Layout("recomputed: DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}", switches=BOTH),
    Layout("recomputed, MTP: TP2+SP", 2, TP2, model="--mtp-num-layers 1", switches=BOTH),
    Layout("recomputed, fused DSA: TP2+SP", 2, TP2, switches={**BOTH, "use_fused_dsa": True}),
    Layout(
        "recomputed beside full recompute: PP2",
        2,
        f"{PP2} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
        switches=BOTH,
    ),
    Layout(
        "recomputed beside the up-projection and core attention",
        1,
        "--recompute-granularity selective --recompute-modules core_attn mla_up_proj",
        switches=BOTH,
    ),
)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_trains_as_stock_in_one_process(lab: Lab, layout: Layout) -> None:
    lab.check(layout)


@pytest.mark.full
def test_activations_change_nothing_at_all(lab: Lab) -> None:
    """Beside the same layout without them, bit for bit, after five steps with Adam."""
    plain, recomputed = (
        lab.run(Layout(name, 2, PP2, switches=switches))
        for name, switches in (("PP2", {}), ("PP2, recomputed", ACTIVATIONS))
    )
    assert [record["lm_loss"] for record in plain.records] == [
        record["lm_loss"] for record in recomputed.records
    ]
    assert all(plain.weights[name].equal(weight) for name, weight in recomputed.weights.items())
