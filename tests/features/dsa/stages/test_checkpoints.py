"""Checkpoints between stages: weights are kept bit for bit, and the optimizer starts anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.features.dsa.stages.jobs_by_stage import differing

CASES = "tests.features.dsa.stages.jobs_by_stage"
CHAIN = ["dense", "warmup", "sparse", "frozen", "sparse"]
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
    "distributed, torch": ("torch", 1, DISTRIBUTED),
    "distributed, slices of buffers": ("dp_reshardable", 1, DISTRIBUTED),
}
ELSEWHERE = {
    "swap-optimizer": {"switches": {"swap_optimizer": True}},
    "virtual-optimizer": {"switches": {"virtual_optimizer": ["all"]}},
    "reuse-fp32-param": {"switches": {"reuse_fp32_param": True}},
    "swap-optimizer, distributed": {"switches": {"swap_optimizer": True}, **DISTRIBUTED},
    "reuse-fp32-param, distributed": {"switches": {"reuse_fp32_param": True}, **DISTRIBUTED},
    "fsdp2": {"switches": {"use_torch_fsdp2": True}, "fsdp2": True},
}
"""Features that keep master weights or moments outside of the optimizer."""


def _unless(name: str, quick: set[str]) -> Any:
    return pytest.param(name, id=name, marks=[] if name in quick else pytest.mark.full)


@pytest.mark.parametrize("name", [_unless(name, {"distributed, slices of buffers"}) for name in WAYS])
def test_a_job_goes_through_all_stages(pool: Any, tmp_path: Path, name: str) -> None:
    way, ranks, options = WAYS[name]
    chain = pool.run(f"{CASES}:chain", ranks, stages=CHAIN, folder=str(tmp_path), way=way, **options)
    for found in chain:
        check(CHAIN, found)
    for stage, result in zip(CHAIN, chain[0], strict=True):
        # The first job has no checkpoint to begin from.
        assert len(result["told"]) == (result is not chain[0][0]), stage
        assert all(f"--dsa-stage {stage}: the checkpoint is of stage" in line for line in result["told"])


@pytest.mark.full
@pytest.mark.parametrize("stage", ["frozen", "sparse"])
@pytest.mark.parametrize("name", ["torch_dist", "torch", "distributed, DP2"])
def test_resuming_in_a_stage_is_bitwise(pool: Any, tmp_path: Path, name: str, stage: str) -> None:
    way, ranks, options = WAYS[name]
    chain = {"stages": ["warmup", stage, stage], "folder": str(tmp_path), "way": way, **options}
    resumed = pool.run(f"{CASES}:chain", ranks, **chain)
    # Two steps and two more, without a checkpoint between.
    unbroken = pool.run(f"{CASES}:chain", ranks, **{**chain, "stages": ["warmup", stage], "steps": [2, 4]})
    for ours, expected in zip(resumed, unbroken, strict=True):
        for what in ("weights", "moments", "masters", "steps"):
            assert not differing(ours[-1]["end"][what], expected[-1]["end"][what]), what


@pytest.mark.parametrize("name", [_unless(name, {"reuse-fp32-param"}) for name in ELSEWHERE])
def test_state_kept_elsewhere_begins_anew(pool: Any, tmp_path: Path, name: str) -> None:
    """The result is bit-identical to a job that loads only weights, with ``--no-load-optim``."""
    options = ELSEWHERE[name]
    way = "fully_reshardable" if "distributed" in name else "torch_dist"
    runs = []
    for alone in (False, True):
        (folder := tmp_path / str(alone)).mkdir()
        job = {"stages": ["warmup", "sparse"], "folder": str(folder), "way": way, **options}
        runs.append(pool.run(f"{CASES}:chain", 2, weights_alone=alone, **job))
    assert len(runs[0][0][1]["told"]) == 1
    for ours, expected in zip(*runs, strict=True):
        assert ours[1]["records"] == expected[1]["records"]
        assert not differing(ours[1]["end"]["weights"], expected[1]["end"]["weights"])
        assert differing(ours[1]["end"]["weights"], ours[1]["loaded"]["weights"])


def check(stages: list[str], found: list[dict[str, Any]]) -> None:
    """Check weights and optimizer state of indexers, and of all other layers, through a job's stages."""
    for indexers in (True, False):

        def of_kind(values: dict[str, Any], indexers: bool = indexers) -> dict[str, Any]:
            return {name: value for name, value in values.items() if (".indexer." in name) == indexers}

        before: dict[str, Any] = {}
        for stage, result in zip(stages, found, strict=True):
            loaded, end = (
                {what: of_kind(values) for what, values in result[when].items()} for when in ("loaded", "end")
            )
            if before:
                assert not differing(loaded["weights"], before["weights"])
            before = end
            # In this stage these weights are frozen.
            if stage not in (("warmup", "sparse") if indexers else ("dense", "sparse", "frozen")):
                assert not end["moments"]
                assert not differing(loaded["weights"], end["weights"]), "weight decay or not"
                continue
            # The optimizer begins without moments and steps.
            assert not any(each.any() for what in ("moments", "steps") for each in loaded[what].values())
            weights = {name: loaded["weights"][name].flatten().float() for name in loaded["masters"]}
            assert not differing(loaded["masters"], weights)
            # Each stage has two steps.
            assert {float(step) for step in end["steps"].values()} == {2}
            assert set(differing(loaded["weights"], end["weights"])) == set(loaded["weights"])
