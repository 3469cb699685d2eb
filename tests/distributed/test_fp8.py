"""Jobs in FP8: features beside Megatron's arguments, and schedules beside layers that keep scales.

Without Transformer Engine Megatron's context for FP8 does nothing, so optimizers, shards and schedules run in
FP8 jobs as they do in others. ``tests/support/scaled_layers.py`` stands in for the layers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.flags import (
    BF16,
    DUALPIPEV,
    EP2,
    FOUR_MICROBATCHES,
    FSDP2,
    FULL_RECOMPUTE,
    FULLY_SHARDED,
    FUSED,
    NO_EXPERTS,
    ON_HOST,
    PAIRS,
    PP2,
    RECOMPUTED,
    REUSE,
    SHALLOW,
    SWAP,
    VIRTUAL,
    VPP2,
    ZERO,
    V,
)
from tests.distributed.parity import Lab, Layout, Outcome, assert_same_bits
from tests.distributed.rows import BESIDE_STOCK
from tests.support import memory_events as events
from tests.support import scaled_layers as scaled
from tests.support.pool import WorkerPool

TRAIN = "tests.support.scaled_layers:train"
HALVES = {"moe_batch_overlap": True, "moe_batch_overlap_always": True}
LATER = {"split_backward": True}
AHEAD = {"recompute_in_advance": True}
DENSE_MLP = f"{SHALLOW} {NO_EXPERTS}"
UNCLIPPED = "--clip-grad 0"
IN_PIPELINE = f"{PP2} {FOUR_MICROBATCHES} {UNCLIPPED}"
IN_V = f"{IN_PIPELINE} {DUALPIPEV}"


@pytest.fixture(scope="module")
def two_steps(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(pool, tmp_path_factory.mktemp("fp8"), steps=2)


@pytest.fixture(scope="module")
def in_fp8(two_steps: Lab) -> Any:
    """Return a function that trains a layout with rounded products, and caches outcomes."""
    outcomes: dict[str, Outcome] = {}

    def run(layout: Layout, recipe: str) -> Outcome:
        key = repr((layout, recipe))
        if key not in outcomes:
            outcomes[key] = two_steps.run(layout, function=TRAIN, recipe=recipe)
        return outcomes[key]

    return run


def full(name: str, *case: Any) -> Any:
    return pytest.param(*case, id=name, marks=pytest.mark.full)


# -- features beside the arguments --------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "model", "switches", "watched"),
    [
        pytest.param(
            ZERO,
            f"{DENSE_MLP} {BF16}",
            {**FUSED, **REUSE, **VIRTUAL, **RECOMPUTED, **ON_HOST},
            ("reuse-fp32-param", "virtual-optimizer", "recompute-norm", "recompute-activation-function"),
            id="one storage of weights, mapped moments, outputs recomputed",
        ),
        pytest.param(
            ZERO, f"{DENSE_MLP} {BF16}", {**FUSED, **SWAP}, ("swap-optimizer",), id="optimizer swapped"
        ),
        pytest.param(FULLY_SHARDED, f"{DENSE_MLP} {BF16}", FSDP2, (events.GATHERED,), id="FSDP2"),
        pytest.param(
            IN_V,
            DENSE_MLP,
            {**V, "dualpipev_dw_detach": True},
            (events.HANDED_ON, events.WAITED),
            id="DualPipeV, weight gradients later",
        ),
        pytest.param(IN_PIPELINE, DENSE_MLP, LATER, (events.WAITED,), id="split backward"),
        pytest.param(EP2, SHALLOW, HALVES, (events.STARTED,), id="halves"),
        pytest.param(f"{EP2} {FOUR_MICROBATCHES}", SHALLOW, PAIRS, (events.STARTED,), id="pairs"),
    ],
)
def test_arguments_for_fp8_change_nothing(
    two_steps: Lab, flags: str, model: str, switches: dict[str, Any], watched: tuple[str, ...]
) -> None:
    layout = Layout("beside FP8", 2, flags, model, switches=switches)
    outcome = two_steps.run(layout, function=TRAIN, recipe="blockwise", rounds=False)
    expected = two_steps.run(layout)
    if model == SHALLOW:
        # In FP8 Megatron pads each expert's rows, and a product of other rows is rounded otherwise.
        assert not two_steps.compare(layout, outcome, expected).violations(BESIDE_STOCK)
    else:
        assert_same_bits(outcome, expected)
    for event in watched:
        assert outcome.memory[events.EVENTS.get(event, event)], event


# -- schedules beside layers that keep scales ---------------------------------------------------

BY_1F1B = Layout("1F1B", 2, IN_PIPELINE, SHALLOW)


@pytest.mark.parametrize(
    ("flags", "switches", "event"),
    [
        full("interleaved", f"{IN_PIPELINE} {VPP2}", {}, scaled.ROUNDED),
        pytest.param(IN_V, V, events.HANDED_ON, id="DualPipeV"),
        full("split backward", IN_PIPELINE, LATER, events.WAITED),
        full("recomputed", f"{IN_PIPELINE} {FULL_RECOMPUTE}", {}, scaled.REPEATED),
        full("DualPipeV, recomputed", f"{IN_V} {FULL_RECOMPUTE}", V, scaled.REPEATED),
        full("split backward, recomputed", f"{IN_PIPELINE} {FULL_RECOMPUTE}", LATER, events.WAITED),
        pytest.param(
            f"{IN_PIPELINE} {FULL_RECOMPUTE}",
            AHEAD,
            scaled.REPEATED,
            id="recomputed in advance",
            marks=pytest.mark.full,
        ),
        full(
            "interleaved, recomputed in advance",
            f"{IN_PIPELINE} {VPP2} {FULL_RECOMPUTE}",
            AHEAD,
            scaled.REPEATED,
        ),
    ],
)
def test_scales_of_earlier_microbatches_are_those_of_1f1b(
    in_fp8: Any, flags: str, switches: dict[str, Any], event: str
) -> None:
    """With delayed scaling a product has other bits if a scale was updated too early, late or often."""
    expected = in_fp8(BY_1F1B, "delayed")
    outcome = in_fp8(Layout("another schedule", 2, flags, SHALLOW, switches=switches), "delayed")
    assert_same_bits(outcome, expected, norm=False)
    assert outcome.memory[event]
    for counts in (outcome.memory, expected.memory):
        assert counts[scaled.MOST] == 2, "two ranks: one microbatch between two updates of a scale"
        assert counts[scaled.UPDATED] > 0
        # Weights are read once a step, in the first of eight microbatches.
        assert counts[scaled.ROUNDED] - counts[scaled.REPEATED] == 8 * counts[scaled.READ]


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
@pytest.mark.parametrize(
    ("flags", "both", "switches", "event", "roundings"),
    [
        (f"{EP2} {FOUR_MICROBATCHES}", {}, PAIRS, events.STARTED, 1),
        (EP2, {}, HALVES, events.STARTED, 2),
        (EP2, FUSED, {**HALVES, "moe_batch_overlap_attention": True}, events.ATTENDED, 2),
    ],
    ids=("pairs", "halves", "halves before attention"),
)
def test_parts_of_a_layer_have_the_scales_of_the_whole(
    two_steps: Lab,
    in_fp8: Any,
    recipe: str,
    flags: str,
    both: dict[str, Any],
    switches: dict[str, Any],
    event: str,
    roundings: int,
) -> None:
    """Sums of fp32 have another order, which rounds by 1e-7; another scale rounds by more than 1e-3."""
    expected = in_fp8(Layout("whole layers", 2, flags, SHALLOW, switches=both), recipe)
    layout = Layout("parts of layers", 2, flags, SHALLOW, switches={**both, **switches})
    outcome = in_fp8(layout, recipe)
    assert outcome.records[0]["lm_loss"] == expected.records[0]["lm_loss"]
    comparison = two_steps.compare(layout, outcome, expected)
    assert comparison.first_gradients[0][0] <= BESIDE_STOCK.first_gradient, comparison
    assert outcome.memory[event]
    if recipe == "delayed":
        assert outcome.memory[scaled.MOST] == 2 * roundings, "two ranks"
