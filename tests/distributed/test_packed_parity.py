"""The main job on packed documents: every layout is the same training as one process."""

from __future__ import annotations

import pytest

from tests.distributed.parity import FP32, HEADING, PP2, SHALLOW, TP2, VPP2, Lab, Layout
from tests.support.figures import tell

PACKED = {"use_fused_dsa": True, "pack_documents": True}
MODEL = f"{SHALLOW} --seq-length 256"  # some samples hold the end of a document
WHOLE = "--micro-batch-size 1"
PACK = f"{WHOLE} --pack-documents"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = (
    ("packed: TP2+SP", 2, TP2),
    ("packed: PP2, all layers recomputed", 2, f"{PP2} {FULL_RECOMPUTE}"),
    ("packed: PP2 x VPP2", 2, f"{PP2} {VPP2}"),
    ("packed: DP2", 2, ""),
)


@pytest.mark.full
@pytest.mark.parametrize(("name", "ranks", "flags"), LAYOUTS, ids=lambda given: str(given))
def test_layout_trains_on_packs_as_one_process(lab: Lab, name: str, ranks: int, flags: str) -> None:
    alone = Layout("packed", 1, PACK, MODEL, switches=PACKED)
    layout = Layout(name, ranks, f"{flags} {PACK}", MODEL, switches=PACKED)
    reference = lab.run(alone)
    comparison = lab.compare(layout, lab.run(layout), reference)
    tell(HEADING, str(comparison))
    problems = comparison.violations(FP32)
    if problems and any(count for count, _ in comparison.flips.values()):
        problems = lab.compare(layout, lab.run(layout, reference.choices), reference).violations(FP32)
    assert not problems, "\n".join(problems)


@pytest.mark.full
def test_packs_are_other_training(lab: Lab) -> None:
    """Documents that see each other give another loss: the packs are packs."""
    packed = lab.run(Layout("packed", 1, PACK, MODEL, switches=PACKED))
    whole = lab.run(Layout("whole", 1, WHOLE, MODEL, switches={"use_fused_dsa": True}))
    losses = [[record["lm_loss"] for record in outcome.records] for outcome in (packed, whole)]
    assert losses[0] != losses[1]
