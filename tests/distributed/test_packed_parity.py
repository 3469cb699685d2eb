"""The main job on packed documents: every layout is the same training as one process."""

from __future__ import annotations

import pytest

from tests.distributed.parity import PP2, SHALLOW, TP2, VPP2, Lab, Layout, Outcome

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
CONTEXT = ((2, ""), (4, ""), (2, TP2), (2, PP2))
# Ranks have different numbers of rows that count: the loss is that of one rank per token only.
PER_TOKEN = f"{MODEL} --calculate-per-token-loss --moe-router-load-balancing-type none"


@pytest.fixture(scope="module")
def alone(lab: Lab) -> Outcome:
    return lab.run(Layout("packed", 1, PACK, MODEL, switches=PACKED))


@pytest.fixture(scope="module")
def alone_for_ten_steps(ten_steps: Lab) -> Outcome:
    return ten_steps.run(Layout("packed", 1, PACK, PER_TOKEN, switches=PACKED))


@pytest.mark.full
@pytest.mark.parametrize(("name", "ranks", "flags"), LAYOUTS, ids=lambda given: str(given))
def test_layout_trains_on_packs_as_one_process(
    lab: Lab, alone: Outcome, name: str, ranks: int, flags: str
) -> None:
    lab.check(Layout(name, ranks, f"{flags} {PACK}", MODEL, switches=PACKED), reference=alone)


@pytest.mark.full
@pytest.mark.parametrize(("cp", "flags"), CONTEXT, ids=str)
def test_ten_steps_on_packs_that_context_parallel_ranks_share(
    ten_steps: Lab, alone_for_ten_steps: Outcome, cp: int, flags: str
) -> None:
    shared = {**PACKED, "context_parallel_size": cp, "cp_block_rows": 16}
    own = f"--context-parallel-size {cp} --cp-block-rows 16 {flags} {PACK}"
    ranks = cp * (2 if flags else 1)
    layout = Layout(f"packed: CP{cp} {flags}", ranks, own, PER_TOKEN, switches=shared)
    ten_steps.check(layout, reference=alone_for_ten_steps)


@pytest.mark.full
def test_packs_are_other_training(lab: Lab, alone: Outcome) -> None:
    """Documents that see each other give another loss: the packs are packs."""
    whole = lab.run(Layout("whole", 1, WHOLE, MODEL, switches={"use_fused_dsa": True}))
    losses = [[record["lm_loss"] for record in outcome.records] for outcome in (alone, whole)]
    assert losses[0] != losses[1]
