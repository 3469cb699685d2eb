"""A failed step leaves the same state as stock, bit for bit, or an optimizer that refuses to continue."""

from __future__ import annotations

import pytest

from tests.features.memory.failure_cases import POINTS
from tests.support.optimizer_training import DISTRIBUTED, PLAIN

CASES = "tests.features.memory.failure_cases"
REUSE = {"reuse_fp32_param": True}
SWAP = {"swap_optimizer": True}
VIRTUAL = {"virtual_optimizer": ["all"]}
FLOAT32 = {"precision": "fp32"}
ALL = tuple(POINTS)
UPDATES = ALL[: ALL.index("before the copy back")]  # with fp32 weights nothing is copied back
NOTHING_WRITTEN = {"before anything"}


@pytest.mark.parametrize(
    ("who", "switches", "points", "options", "goes_on"),
    [
        pytest.param(
            "reuse-fp32-param", REUSE, ALL, PLAIN, NOTHING_WRITTEN, id="reuse, plain", marks=pytest.mark.full
        ),
        pytest.param("reuse-fp32-param", REUSE, ALL, DISTRIBUTED, NOTHING_WRITTEN, id="reuse, distributed"),
        pytest.param(
            "swap-optimizer", SWAP, ALL, PLAIN, NOTHING_WRITTEN, id="swap, plain", marks=pytest.mark.full
        ),
        pytest.param(
            "swap-optimizer",
            SWAP,
            ALL,
            DISTRIBUTED,
            NOTHING_WRITTEN,
            id="swap, distributed",
            marks=pytest.mark.full,
        ),
        pytest.param("swap-optimizer", SWAP, UPDATES, FLOAT32, NOTHING_WRITTEN, id="swap, float32"),
        pytest.param("virtual-optimizer", VIRTUAL, ALL, PLAIN, set(ALL), id="virtual, plain"),
        pytest.param(
            "virtual-optimizer",
            VIRTUAL,
            ALL,
            DISTRIBUTED,
            set(ALL),
            id="virtual, distributed",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "virtual-optimizer",
            VIRTUAL,
            UPDATES,
            FLOAT32,
            set(UPDATES),
            id="virtual, float32",
            marks=pytest.mark.full,
        ),
    ],
)
def test_after_a_failure_training_is_stocks_or_refused(pool, who, switches, points, options, goes_on):
    (off,) = pool.baseline(f"{CASES}:after_failures", 1, points=points, **options)
    (on,) = pool.run(f"{CASES}:after_failures", 1, switches=switches, points=points, **options)
    assert on["none"] == off["none"]
    for point in points:
        assert off[point]["raised"] == on[point]["raised"] == "OutOfLuckError", point
        assert off[point]["refused"] == []
        if point in goes_on:
            assert on[point] == off[point], point
        else:
            assert len(on[point]["refused"]) == 2, f"{point}: a step, and what a checkpoint is made of"
            for refusal in on[point]["refused"]:
                assert refusal.startswith(f"{who}: a step of this optimizer failed in the middle"), point
                assert "load a state dict into the model" in refusal
        assert on[point]["loaded"] == off["none"], f"{point}: from a loaded state"
    changed = {point for point in points if off[point]["loaded"] != off[point]["next"]}
    assert changed == set(points), "what follows a failure differs from what follows a load"


def test_a_change_of_form_that_fails_leaves_no_weights_to_go_on_with(pool):
    for options in (PLAIN, DISTRIBUTED):
        (found,) = pool.run(f"{CASES}:spoiled", 1, switches=REUSE, **options)
        assert found["weights are NaN"]
        assert found["refused"].startswith("reuse-fp32-param: a step of this optimizer failed")


def test_weights_of_other_ranks_are_not_gone_on_with(pool):
    # Master form overlays other ranks' weights, so even an early failure loses them.
    for found in pool.run(f"{CASES}:others_after_failure", 2, switches=REUSE, **DISTRIBUTED):
        assert (found["own"], found["others"]) == (False, True)
        assert found["refused"].startswith("reuse-fp32-param: a step of this optimizer failed")


@pytest.mark.full
@pytest.mark.parametrize("options", [PLAIN, DISTRIBUTED], ids=["plain", "distributed"])
def test_kernels_that_fail_in_the_middle(pool, options):
    # Kernels update parameters in another order, so a failure leaves another state than stock.
    kernels = "tests.features.memory.virtual_optimizer.kernel_cases"
    (result,) = pool.run(f"{kernels}:after_failure", 1, switches=VIRTUAL, **options)
    (whole,) = pool.run(f"{kernels}:train", 1, switches=VIRTUAL, steps=2, **options)
    for refusal in result["refused"]:
        assert refusal.startswith("virtual-optimizer: a step of this optimizer failed in the middle")
    assert result["record"] == whole["records"][1]
    for what in ("weights", "masters", "moments"):
        assert result[what] == whole[what]
