"""Models with grouped experts, from Megatron's initial weights and through checkpoints."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(training, id=name, marks=pytest.mark.full if training is PLAIN else ())
        for name, training in TRAININGS.items()
    ],
)
def test_ten_steps_from_initial_weights(pool, training):
    """In fp32, initial weights are equal, every gradient is reduced once, and optimizer steps agree."""
    options = {**training, "precision": "fp32", "ep": 2}
    ours, theirs = (pool.run(f"{CASES}:losses", 2, grouped=on, build=options)[0] for on in (True, False))
    assert_same(ours, theirs, 1e-5)
    assert ours[-1]["loss"] != ours[0]["loss"]


OVERLAP = {**DISTRIBUTED, "overlap": True}
FP32 = {"precision": "fp32"}
KN = {"gemm_weight_layout": "kn"}
BY_PARAMETER = {True: "fully_reshardable", False: "torch_dist"}
"""Dict from whether the optimizer is distributed to a checkpoint format that names each parameter."""
WAYS = {
    "fully_reshardable": (DISTRIBUTED, "fully_reshardable", {}),
    "torch_dist": (PLAIN, "torch_dist", {}),
    "torch": (PLAIN, "torch", KN),
    "torch, distributed, buckets": (OVERLAP, "torch", KN),
    "torch, nk": (PLAIN, "torch", {}),
    "torch, fp32": ({**PLAIN, **FP32}, "torch", {}),
    "torch, distributed": (DISTRIBUTED, "torch", {}),
    "torch, one expert on each rank": ({**PLAIN, "overrides": {"num_moe_experts": 2}}, "torch", {}),
    "torch, EP1, distributed": ({**DISTRIBUTED, "ep": 1}, "torch", {}),
    "dp_zero_gather_scatter": (DISTRIBUTED, "dp_zero_gather_scatter", {}),
    "dp_zero_gather_scatter, buckets": (OVERLAP, "dp_zero_gather_scatter", KN),
    "torch, moments on the host": ({**PLAIN, "switches": {"virtual_optimizer": ["all"]}}, "torch", {}),
    "torch, shared masters": ({**PLAIN, "switches": {"reuse_fp32_param": True}}, "torch", {}),
    "torch, swapped": ({**PLAIN, "switches": {"swap_optimizer": True}}, "torch", {}),
}
LONG = list(WAYS)[1:]


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "way", "layout"),
    [
        pytest.param(*way, id=name, marks=pytest.mark.full if name in LONG else [])
        for name, way in WAYS.items()
    ],
)
def test_checkpoints_of_one_kind_are_those_of_the_other(pool, tmp_path, options, way, layout):
    """Weights, masters and moments move from sequential to grouped experts and back, bit for bit."""
    sequential, grouped, by_name = (str(tmp_path / name) for name in ("sequential", "grouped", "known"))
    for folder in (sequential, grouped, by_name):
        Path(folder).mkdir()
    run = {"function": f"{JOB}:train", "world_size": 2, "ep": 2, **options}
    ours = {**run, "switches": {**run.get("switches", {}), **GROUPED["switches"], **layout}}
    ours["overrides"] = {**run.get("overrides", {}), **GROUPED["overrides"]}
    saved = pool.run(**run, steps=3, save=(way, sequential))
    mine = pool.run(**ours, steps=0, load=(way, sequential), save=(way, grouped))
    go_on = {"steps": 2, "first": 3}
    theirs = pool.run(**run, **go_on, load=(way, sequential))
    back = pool.run(**run, **go_on, load=(way, grouped))
    for after, before, unbroken in zip(back, saved, theirs, strict=True):
        for what in ("weights", "masters", "moments"):
            assert after["loaded"][what] == before[what], what
            assert after[what] == unbroken[what], f"{what} two steps later"
    by_parameter = BY_PARAMETER["distributed" in options]
    if way == by_parameter:
        going_on = pool.run(**ours, **go_on, load=(way, sequential))
        for resumed, stock in zip(going_on, theirs, strict=True):
            assert_same(resumed["records"], stock["records"], 2e-3)
    else:  # the stacks' entries equal those loaded by way of a format that names each parameter
        pool.run(**run, steps=0, load=(way, sequential), save=(by_parameter, by_name))
        expected = pool.run(**ours, steps=0, load=(by_parameter, by_name))
        for resumed, each in zip(mine, expected, strict=True):
            assert resumed["loaded"] == each["loaded"]


@pytest.mark.parametrize("saves", [pytest.param(True, marks=pytest.mark.full), False], ids=["save", "load"])
def test_slices_of_buffers_are_refused(pool, tmp_path, saves):
    """Slices of buffers follow the order of parameters, which differs, so loading them would mix up
    values.
    """
    way = {"save" if saves else "load": ("dp_reshardable", str(tmp_path))}
    if not saves:
        pool.run(f"{JOB}:train", 1, steps=1, save=way["load"], **DISTRIBUTED)
    run = {"case": f"{JOB}:train", "steps": 1, **way, **DISTRIBUTED}
    (error,) = pool.run("tests.support.model:error_of", 1, **run, **GROUPED)
    assert error.startswith(
        "RuntimeError: moe-grouped-gemm: in this format of the distributed optimizer's state, dp_reshardable"
    )
    assert "--dist-ckpt-optim-fully-reshardable" in error


def test_buffers_with_gaps_are_refused(pool, tmp_path):
    run = {"case": f"{JOB}:train", "steps": 1, "save": ("torch", str(tmp_path)), **DISTRIBUTED}
    run["switches"] = GROUPED["switches"]
    run["overrides"] = {**GROUPED["overrides"], "moe_ffn_hidden_size": 33}
    (error,) = pool.run("tests.support.model:error_of", 1, **run)
    assert "gaps behind parameters whose number of entries is no multiple of 64" in error
