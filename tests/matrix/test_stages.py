"""Stages of DSA training on every release: gradients equal Megatron's own step in the same state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.features.dsa.stages.test_checkpoints import check
from tests.matrix.record import Note
from tests.matrix.test_features import CP2, GATHERED, STEPS, run
from tests.support.model import assert_same_gradients

pytestmark = pytest.mark.releases(">=0.12.1")

# A selection of all keys equals dense attention, and its loss equals the dense loss.
DENSE = {"dsa_indexer_topk": 64, "dsa_indexer_use_sparse_loss": False}
SHARING = {"dsa_indexer_topk_freq": 2}
LAYOUTS = ["one process", "TP2+SP", "PP2 x VPP2", "CP2"]


def of_layout(layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the switches and overrides that a layout needs."""
    return (dict(CP2), dict(GATHERED)) if layout == "CP2" else ({}, {})


def of_stage(stage: str) -> Callable[[str], bool]:
    """Return a predicate on names for the parameters that a stage trains."""
    return lambda name: (".indexer." in name) == (stage == "warmup")


@pytest.mark.parametrize("sharing", [{}, SHARING], ids=["each layer selects", "shared selections"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", ["dense", "warmup", "frozen"])
def test_gradients_are_those_of_the_same_state(
    pool: Any, note: Note, stage: str, layout: str, sharing: dict[str, Any]
) -> None:
    switches, overrides = of_layout(layout)
    overrides |= sharing
    if sharing and layout == "PP2 x VPP2":
        layout = "PP2"  # each chunk begins with a selecting layer
    if note.begins(layout, "dsa-stage", switches={**switches, "dsa_stage": stage}):
        return
    state = overrides if stage == "frozen" else {**overrides, **DENSE}
    theirs = run(pool, layout, switches=switches, overrides=state)
    ours = run(pool, layout, switches={**switches, "dsa_stage": stage}, overrides=overrides)
    for mine, stock in zip(ours, theirs, strict=True):
        assert {".indexer." in name for name in mine["gradients"]} == {stage == "warmup"}
        expected = {name: stock["gradients"][name] for name in mine["gradients"]}
        assert len(mine["gradients"]) == len(list(filter(of_stage(stage), stock["gradients"])))
        assert_same_gradients(mine["gradients"], expected)
        assert mine["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        if stage == "warmup":
            assert mine["indexer loss"] == pytest.approx(stock["indexer loss"], rel=1e-4)
        else:
            assert not mine["indexer loss"]
    note.trained(ours)


@pytest.mark.parametrize("way", ["torch_dist", "torch"])
def test_a_job_goes_from_stage_to_stage(pool: Any, tmp_path: Path, way: str) -> None:
    stages = ["dense", "warmup", "sparse", "frozen"]
    (found,) = pool.run(f"{STEPS}:stage_after_stage", 1, stages=stages, folder=str(tmp_path), way=way)
    check(stages, found)
