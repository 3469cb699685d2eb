"""The optimizer's state across stages: what goes on is kept bit for bit, what is new begins at step 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.features.dsa.stages.jobs_by_stage import differing

CASES = "tests.features.dsa.stages.jobs_by_stage"
CHAIN = ["dense", "warmup", "sparse", "frozen"]
DISTRIBUTED = {"distributed": True}
OVERLAP = {"overlap": True, "ddp_options": {"bucket_size": None}}
WAYS = {
    "torch_dist": ("torch_dist", 1, {}),
    "torch": ("torch", 1, {}),
    "fp32, torch": ("torch", 1, {"precision": "fp32"}),
    "fp32": ("torch_dist", 1, {"precision": "fp32"}),
    "distributed, fp32": ("fully_reshardable", 1, {"precision": "fp32", **DISTRIBUTED}),
    "distributed, fp32, DP2": ("fully_reshardable", 2, {"precision": "fp32", **DISTRIBUTED}),
    "distributed, DP2": ("fully_reshardable", 2, DISTRIBUTED),
    "distributed, overlap, DP2": ("fully_reshardable", 2, {**DISTRIBUTED, **OVERLAP}),
    "distributed, padded buckets": ("fully_reshardable", 1, {**DISTRIBUTED, "overlap": True}),
    "distributed, padded buckets, DP2": ("fully_reshardable", 2, {**DISTRIBUTED, "overlap": True}),
    "distributed, PP2": ("fully_reshardable", 2, {"pp": 2, **DISTRIBUTED}),
    "EP2": ("torch_dist", 2, {"ep": 2}),
    "EP2, distributed": ("fully_reshardable", 2, {"ep": 2, **DISTRIBUTED}),
    "EP2, torch": ("torch", 2, {"ep": 2}),
}


def _unless(name: str, quick: set[str]) -> Any:
    return pytest.param(name, id=name, marks=[] if name in quick else pytest.mark.full)


@pytest.mark.parametrize(
    "name", [_unless(name, {"torch", "distributed, fp32", "distributed, padded buckets"}) for name in WAYS]
)
def test_a_job_goes_through_all_stages(pool: Any, tmp_path: Path, name: str) -> None:
    way, ranks, options = WAYS[name]
    stages = [*CHAIN, "sparse"]
    for found in pool.run(f"{CASES}:chain", ranks, stages=stages, folder=str(tmp_path), way=way, **options):
        check(stages, found)


@pytest.mark.full
@pytest.mark.parametrize("stage", ["frozen", "sparse"])
@pytest.mark.parametrize("name", ["torch_dist", "torch", "distributed, DP2"])
def test_resuming_in_a_stage_is_bitwise(pool: Any, tmp_path: Path, name: str, stage: str) -> None:
    way, ranks, options = WAYS[name]
    chain = {"stages": ["warmup", stage, stage], "folder": str(tmp_path), "way": way, **options}
    resumed = pool.run(f"{CASES}:chain", ranks, **chain)
    unbroken = pool.run(f"{CASES}:chain", ranks, **{**chain, "stages": ["warmup", stage], "steps": [2, 4]})
    for ours, expected in zip(resumed, unbroken, strict=True):
        for what in ("weights", "moments", "masters", "steps"):
            assert not differing(ours[-1]["end"][what], expected[-1]["end"][what]), what


@pytest.mark.parametrize(
    ("way", "stages"), [("dp_reshardable", ["sparse", "frozen"]), ("torch", ["warmup", "sparse"])]
)
def test_whole_buffers_are_refused(pool: Any, tmp_path: Path, way: str, stages: list[str]) -> None:
    options = {"stages": stages, "folder": str(tmp_path), "way": way, "distributed": True}
    (error,) = pool.run(f"{CASES}:error_of_chain", 1, **options)
    assert f"is saved as {way}, whole buffers" in error
    assert "--dist-ckpt-optim-fully-reshardable" in error


@pytest.mark.parametrize(
    ("switch", "value", "way"),
    [
        ("swap_optimizer", True, "torch_dist"),
        pytest.param("virtual_optimizer", ["all"], "torch_dist", marks=pytest.mark.full),
        pytest.param("reuse_fp32_param", True, "torch_dist", marks=pytest.mark.full),
        pytest.param("swap_optimizer", True, "torch", marks=pytest.mark.full),
        pytest.param("reuse_fp32_param", True, "torch", marks=pytest.mark.full),
    ],
)
def test_state_kept_elsewhere_is_refused(
    pool: Any, tmp_path: Path, switch: str, value: Any, way: str
) -> None:
    options = {"stages": ["warmup", "sparse"], "folder": str(tmp_path), "way": way}
    (error,) = pool.run(f"{CASES}:error_of_chain", 1, switches={switch: value}, **options)
    assert f"does not go from stage to stage beside --{switch.replace('_', '-')}" in error
    assert "--no-load-optim" in error


@pytest.mark.full
def test_state_in_shards_of_fsdp2_is_refused(pool: Any, tmp_path: Path) -> None:
    options = {"stages": ["warmup", "sparse"], "folder": str(tmp_path), "way": "torch_dist", "fsdp2": True}
    switches = {"use_torch_fsdp2": True}
    for error in pool.run(f"{CASES}:error_of_chain", 2, switches=switches, **options):
        assert "does not go from stage to stage beside --use-torch-fsdp2" in error


def check(stages: list[str], found: list[dict[str, Any]]) -> None:
    """Follow indexers, and all else, through the stages of a job."""
    for indexers in (True, False):

        def of_kind(values: dict[str, Any], indexers: bool = indexers) -> dict[str, Any]:
            return {name: value for name, value in values.items() if (".indexer." in name) == indexers}

        before: dict[str, Any] = {}
        steps = 0
        for stage, result in zip(stages, found, strict=True):
            loaded, end = (
                {what: of_kind(values) for what, values in result[when].items()} for when in ("loaded", "end")
            )
            if before:
                assert not differing(loaded["weights"], before["weights"])
            if stage not in (("warmup", "sparse") if indexers else ("dense", "sparse", "frozen")):
                assert not end["moments"]
                assert not differing(loaded["weights"], end["weights"]), "weight decay or not"
                before, steps = end, 0
                continue
            if before and before["moments"]:
                assert not differing(loaded["moments"], before["moments"])
                assert not differing(loaded["masters"], before["masters"])
            elif before:
                assert not any(each.any() for each in loaded["moments"].values())
                weights = {name: loaded["weights"][name].flatten().float() for name in loaded["masters"]}
                assert not differing(loaded["masters"], weights)
            before, steps = end, steps + 2
            assert {float(step) for step in end["steps"].values()} == {steps}
            assert set(differing(loaded["weights"], end["weights"])) == set(loaded["weights"])
