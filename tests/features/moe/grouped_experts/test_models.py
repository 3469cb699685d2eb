"""Whole models with grouped experts: from Megatron's initial weights, and through checkpoints."""

from __future__ import annotations

import pytest

from tests.support.optimizer_training import DISTRIBUTED, JOB, PLAIN

CASES = "tests.features.moe.grouped_experts.model_cases"
GROUPED = {"switches": {"moe_grouped_gemm": True}, "overrides": {"moe_grouped_gemm": True}}
TRAININGS = {
    "plain optimizer": PLAIN,
    "distributed optimizer, overlapped": {**DISTRIBUTED, "overlap": True},
}


def assert_same(ours, theirs, rtol):
    for mine, stock in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(stock["loss"], rel=rtol)
        assert mine["norm"] == pytest.approx(stock["norm"], rel=rtol)


@pytest.mark.parametrize("training", TRAININGS.values(), ids=list(TRAININGS))
def test_ten_steps_from_initial_weights(pool, training):
    """fp32: the weights are drawn alike, every gradient is reduced once and the optimizer steps alike."""
    options = {**training, "precision": "fp32", "ep": 2}
    ours, theirs = (pool.run(f"{CASES}:losses", 2, grouped=on, build=options)[0] for on in (True, False))
    assert_same(ours, theirs, 1e-5)
    assert ours[-1]["loss"] != ours[0]["loss"]


WAYS = [(DISTRIBUTED, "fully_reshardable"), (PLAIN, "torch_dist")]


@pytest.mark.parametrize(("options", "way"), WAYS, ids=[way for _, way in WAYS])
def test_checkpoints_of_one_kind_are_those_of_the_other(pool, tmp_path, options, way):
    """Weights, master weights and moments go from sequential to grouped experts and back to the bit."""
    folders = [tmp_path / name for name in ("sequential", "grouped")]
    for folder in folders:
        folder.mkdir()
    first, second = ((way, str(folder)) for folder in folders)
    run = {"function": f"{JOB}:train", "world_size": 2, "ep": 2, **options}
    saved = pool.run(**run, steps=3, save=first)
    theirs = pool.run(**run, steps=2, first=3, load=first)
    ours = pool.run(**run, **GROUPED, steps=2, first=3, load=first)
    for mine, stock in zip(ours, theirs, strict=True):
        assert_same(mine["records"], stock["records"], 2e-3)
    pool.run(**run, **GROUPED, steps=0, load=first, save=second)
    back = pool.run(**run, steps=0, load=second)
    for after, before in zip(back, saved, strict=True):
        for what in ("weights", "masters", "moments"):
            assert after["loaded"][what] == before[what], what


@pytest.mark.parametrize("way", ["dp_reshardable", "torch", "dp_zero_gather_scatter"])
def test_formats_of_buffers_are_refused(pool, tmp_path, way):
    """They hold slices in the order of the parameters, and would be read without complaint in another one."""
    run = {"case": f"{JOB}:train", "steps": 1, "save": (way, str(tmp_path)), **DISTRIBUTED}
    (error,) = pool.run("tests.support.model:error_of", 1, **run, **GROUPED)
    assert error.startswith(
        "RuntimeError: moe-grouped-gemm: this format of the distributed optimizer's state"
    )
    assert "--dist-ckpt-optim-fully-reshardable" in error
