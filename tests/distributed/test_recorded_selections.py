"""A run that replays recorded selections is bit-identical to the run that recorded them.

In another layout it attends to the same keys, where near ties would otherwise flip.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindspeed_dsa.features.dsa.selections.format import Recording
from tests.distributed.flags import (
    EP2,
    FOUR_MICROBATCHES,
    FULL_RECOMPUTE,
    FUSED,
    GLM_5_2,
    MTP,
    NO_LOSS,
    PACK,
    PACKED,
    PACKS,
    PAIRS,
    PP2,
    SHALLOW,
    TP2,
    VPP2,
)
from tests.distributed.parity import Bounds, Lab, Layout, Outcome, assert_same_bits
from tests.support.pool import CaseError

CP2 = "--context-parallel-size 2"
RECORDS = "tests.distributed.recorded:train"
ODD = f"{SHALLOW} --seq-length 29"
IN_PAIRS = f"{PP2} {VPP2} {EP2} {FOUR_MICROBATCHES} {FULL_RECOMPUTE}"
ONE = Layout("one process", 1, model=SHALLOW, switches=FUSED)
REPEATED = [
    Layout("TP2+SP, all layers recomputed", 2, f"{TP2} {FULL_RECOMPUTE}", SHALLOW, switches=FUSED),
    ONE,
    Layout("PP2 x VPP2", 2, f"{PP2} {VPP2}", switches=FUSED),
    Layout("CP2", 2, CP2, SHALLOW, switches=FUSED),
    Layout("CP2, padded", 2, CP2, ODD, switches=FUSED),
    Layout("TP2+SP, padded, all layers recomputed", 2, f"{TP2} {FULL_RECOMPUTE}", ODD, switches=FUSED),
    Layout("packs", 1, PACK, PACKS, switches=PACKED),
    Layout("packs, CP2", 2, f"{PACK} {CP2}", PACKS, switches=PACKED),
    Layout("pairs, all layers recomputed", 4, IN_PAIRS, switches={**FUSED, **PAIRS}),
    Layout("shared selections, MTP", 1, FULL_RECOMPUTE, f"{GLM_5_2} {MTP}", switches=FUSED),
    Layout("no loss", 1, FULL_RECOMPUTE, f"{SHALLOW} {NO_LOSS}", switches=FUSED),
]


def recording(lab: Lab, layout: Layout, folder: Path, **switches: object) -> Outcome:
    more = {"dsa_record_selections": str(folder), **switches}
    return lab.run(replace(layout, switches={**layout.switches, **more}), function=RECORDS)


def replaying(lab: Lab, layout: Layout, folder: Path) -> Outcome:
    switches = {**layout.switches, "dsa_replay_selections": str(folder)}
    # Without the indexer loss, a replay needs no indexer scores, so no indexer runs.
    return lab.run(replace(layout, switches=switches), selects=NO_LOSS not in layout.model)


@pytest.mark.full
@pytest.mark.parametrize("layout", REPEATED, ids=lambda layout: layout.name)
def test_a_replay_repeats_the_run(lab, tmp_path, layout):
    plain = lab.run(layout)
    recorded = recording(lab, layout, tmp_path / "selections")
    assert_same_bits(recorded, plain)
    assert not Recording.open(tmp_path / "selections").problems
    assert_same_bits(replaying(lab, layout, tmp_path / "selections"), recorded)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout("TP2+SP", 2, TP2, SHALLOW, switches=FUSED),
        Layout("CP2", 2, CP2, SHALLOW, switches=FUSED),
        Layout("CP2 by blocks", 2, CP2, SHALLOW, switches={**FUSED, "cp_block_rows": 4}),
        Layout("PP2", 2, PP2, SHALLOW, switches=FUSED),
        Layout("DP2", 2, "", SHALLOW, switches=FUSED),
        Layout("EP2", 2, EP2, SHALLOW, switches=FUSED),
    ],
    ids=lambda layout: layout.name,
)
@pytest.mark.parametrize("how", ["folder", "batch"])
def test_another_layout_attends_to_the_same_keys(lab, tmp_path, layout, how):
    one, again = tmp_path / "one", tmp_path / "again"
    reference = recording(lab, ONE, one)
    if how == "batch":
        more = {"dsa_replay_selections": "batch", "dsa_record_selections": str(again)}
        layout = replace(layout, switches={**layout.switches, **more})
        function = "tests.distributed.recorded:train_handing_over"
        outcome = lab.run(layout, function=function, handed=str(one))
    else:
        outcome = recording(lab, layout, again, dsa_replay_selections=str(one))
    a, b = Recording.open(one), Recording.open(again)
    assert a.places() == b.places()
    for place in a.places():
        assert np.array_equal(a.array(place.step, place.sequence), b.array(place.step, place.sequence))
    # The lab also records the indexer's own choices. They may flip, but a replay does not use them.
    comparison = lab.compare(layout, outcome, reference)
    assert not comparison.violations(Bounds(forced=False)), str(comparison)


@pytest.mark.full
def test_a_foreign_selection_changes_the_run(lab, tmp_path):
    """A replay of another model's recording attends to the recorded keys, which changes the losses."""
    other = replace(ONE, flags="--lr 1e-1")
    recording(lab, other, tmp_path / "other")
    plain = lab.run(ONE)
    outcome = recording(lab, ONE, tmp_path / "again", dsa_replay_selections=str(tmp_path / "other"))
    losses, others = ([record["lm_loss"] for record in each.records] for each in (outcome, plain))
    # In the first step both sides have the same weights, hence the same selection.
    assert losses[0] == others[0]
    assert losses[1:] != others[1:]
    a, b = (Recording.open(tmp_path / name) for name in ("other", "again"))
    assert a.places() == b.places()
    assert all(
        np.array_equal(a.array(place.step, place.sequence), b.array(place.step, place.sequence))
        for place in a.places()
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [ONE, Layout("CP2", 2, CP2, SHALLOW, switches=FUSED)], ids=lambda each: each.name
)
def test_other_data_are_noticed(lab, tmp_path, layout):
    recording(lab, layout, tmp_path)
    other = replace(layout, flags=f"{layout.flags} --seed 7")
    with pytest.raises(
        CaseError, match=r"step 1, sequence \d, layer 1: row \d+ has another token than it had"
    ):
        replaying(lab, other, tmp_path)
