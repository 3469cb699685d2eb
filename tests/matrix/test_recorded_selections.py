"""Replayed selections give the same losses and gradients, bit for bit, on every release."""

from __future__ import annotations

import pytest

from mindspeed_dsa.features.dsa.selections.format import Recording

pytestmark = pytest.mark.releases(">=0.12.1")

STEP = "tests.matrix.recorded_steps:step"
FUSED = {"use_fused_dsa": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GLM = {"dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
CASES = {
    "one process": ({}, {}),
    "all layers recomputed": (FULL, {}),
    "TP2+SP, shared selections": (GLM, {"tp": 2}),
    "PP2 x VPP2": ({}, {"pp": 2, "vpp": 2}),
    "CP2": ({}, {"cp": 2}),
    "MTP": (MTP, {}),
}


def run(pool, switches, overrides, sizes):
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    if "cp" in sizes:
        switches = {**switches, "context_parallel_size": 2}
    return pool.run(STEP, ranks, switches=switches, overrides=overrides, num_microbatches=4, **sizes)


@pytest.mark.parametrize("name", CASES)
def test_a_replay_repeats_the_step(pool, tmp_path, name):
    overrides, sizes = CASES[name]
    folder = tmp_path / "selections"
    plain = run(pool, FUSED, overrides, sizes)
    recorded = run(pool, {**FUSED, "dsa_record_selections": str(folder)}, overrides, sizes)
    replayed = run(pool, {**FUSED, "dsa_replay_selections": str(folder)}, overrides, sizes)
    recording = Recording.open(folder)
    parts = sizes.get("cp", 1)
    # All ranks, except further tensor parallel ones, record their layers and rows of every microbatch.
    assert sum(result["recorded"] for result in recorded) == len(recording.places()) * parts
    assert {place.layer for place in recording.places()} == set(recording.header.computing)
    assert all(result["replayed"] for result in replayed)
    for results in (recorded, replayed):
        for result, expected in zip(results, plain, strict=True):
            assert result["losses"] == expected["losses"]
            assert result["gradients"].keys() == expected["gradients"].keys()
            different = [
                key
                for key, value in expected["gradients"].items()
                if not value.equal(result["gradients"][key])
            ]
            assert not different
