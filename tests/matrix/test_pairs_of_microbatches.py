"""Pairs of a forward and a backward on the installed release, and the features that work inside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.features.moe.balanced_experts import popular_experts as balanced
from tests.matrix.record import Note
from tests.matrix.test_features import FULL, MOVED_ELSEWHERE, Case, assert_same, happened, run
from tests.support import memory_events as events

LAYOUT = "PP2 x VPP2 x EP2"
EXPERTS_ON_BOTH_STAGES = {"moe_layer_freq": [0, 1, 1, 1]}
PAIRS = {"moe_fb_overlap": True}
EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
IN_BUBBLES = {"recompute_in_bubble": True}
TWO_STREAMS = {"two_streams": True}


def in_pairs(feature: str, event: str, switches: Mapping[str, Any] | None = None, **overrides: Any) -> Case:
    """Return a feature's case in pairs; its name in the record includes the recomputed part."""
    recomputed = {"full": ", layers recomputed", "selective": ", experts recomputed"}
    name = LAYOUT + ("" if feature == "moe-fb-overlap" else ", in pairs")
    name += recomputed.get(overrides.get("recompute_granularity", ""), "")
    overrides |= EXPERTS_ON_BOTH_STAGES
    return Case(feature, LAYOUT, switches or {}, event, overrides, rtol=1e-5, name=name)


CASES = (
    in_pairs("moe-fb-overlap", events.STARTED),
    in_pairs("moe-fb-overlap", events.STARTED, **FULL),
    in_pairs("moe-fb-overlap", events.STARTED, **EXPERTS),
    in_pairs("balanced-moe-experts", events.MOVED, balanced.ALWAYS),
    in_pairs("balanced-moe-experts", events.MOVED, balanced.ALWAYS, **FULL),
    in_pairs("recompute-ahead", "ahead", IN_BUBBLES, **FULL),
    in_pairs("split-backward", events.WAITED, {"split_backward": True}),
    in_pairs("split-backward", events.WAITED, {"split_backward": True}, **FULL),
    Case(
        "dualpipev",
        LAYOUT,
        {"schedules_method": "dualpipev", "dualpipev_dw_detach": True},
        events.WAITED,
        EXPERTS_ON_BOTH_STAGES,
        rtol=1e-5,
        name="PP2 x EP2, in pairs, weight gradients later",
    ),
    in_pairs("two-streams", events.BESIDE, TWO_STREAMS),
)


@pytest.mark.releases(">=0.14")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_step_without(pool: Any, note: Note, tmp_path: Path, case: Case) -> None:
    """The reference is stock's own schedule with the same recomputation."""
    if note.begins(case.name, case.feature, switches=case.switches):
        return
    theirs = run(pool, LAYOUT, overrides=case.overrides)
    ours = run(pool, LAYOUT, switches={**PAIRS, **case.switches}, overrides=case.overrides)
    assert_same(ours, theirs, case.rtol, anywhere=case.feature in MOVED_ELSEWHERE)
    assert happened(case, ours, tmp_path)
    assert not happened(case, theirs, tmp_path)
    assert all(rank["counts"].get(events.STARTED, 0) for rank in ours), "pairs are at work beside it"
    note.trained(ours)


@pytest.mark.releases("<0.14")
def test_releases_without_such_a_schedule_refuse_it(note: Note) -> None:
    assert note.begins(LAYOUT, "moe-fb-overlap", switches=PAIRS)
