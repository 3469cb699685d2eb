"""Fused DSA in every layout is the same training as Megatron's own DSA in one process."""

from __future__ import annotations

import pytest

from tests.distributed.parity import EP2, PP2, PP4, SHALLOW, TP2, VPP2, ZERO, Lab, Layout

FUSED = {"use_fused_dsa": True}
IN_BACKWARD = {"use_fused_dsa": True, "dsa_fuse_kl_in_backward": True}
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules"

LAYOUTS = (Layout("fused: TP2+SP", 2, TP2, SHALLOW, switches=FUSED),)
MORE = (
    Layout("fused", switches=FUSED),
    Layout("fused: DP2, distributed optimizer, overlap", 2, f"{ZERO} {OVERLAP}", switches=FUSED),
    Layout("fused, loss in backward: TP2+SP", 2, TP2, switches=IN_BACKWARD),
    Layout("fused: PP4 x VPP2", 4, f"{PP4} {VPP2}", switches=FUSED),
    Layout("fused: PP2", 2, PP2, switches=FUSED),
    Layout("fused: EP2", 2, EP2, switches=FUSED),
    Layout("fused: TP2+SP x PP2", 4, f"{TP2} {PP2}", switches=FUSED),
    Layout("fused: TP2+SP, core attention recomputed", 2, f"{TP2} {SELECTIVE} core_attn", switches=FUSED),
    Layout(
        "fused, loss in backward: core attention recomputed",
        1,
        f"{SELECTIVE} core_attn",
        switches=IN_BACKWARD,
    ),
    Layout("fused: up-projection recomputed", 1, f"{SELECTIVE} mla_up_proj", switches=FUSED),
    Layout("fused: PP2, all layers recomputed", 2, f"{PP2} {FULL_RECOMPUTE}", switches=FUSED),
    Layout("fused, MTP: TP2+SP", 2, TP2, model="--mtp-num-layers 1", switches=FUSED),
    Layout("fused, no indexer loss: TP2+SP", 2, TP2, model="--dsa-indexer-loss-coeff 0", switches=FUSED),
    Layout(
        "fused, dense indexer loss: TP2+SP", 2, TP2, model="--no-dsa-indexer-use-sparse-loss", switches=FUSED
    ),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_trains_as_stock_in_one_process(lab: Lab, layout: Layout) -> None:
    lab.check(layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", MORE, ids=lambda layout: layout.name)
def test_more_layouts_train_as_stock_in_one_process(lab: Lab, layout: Layout) -> None:
    lab.check(layout)
