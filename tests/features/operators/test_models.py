"""Models with fused operators compute the same as with Megatron's own operations."""

from __future__ import annotations

import pytest
import torch

from tests.features.memory.pairs import FEATURES as MEMORY
from tests.features.operators.fused_modules import ALL
from tests.support.memory_events import EVENTS, FUSED_OPERATORS
from tests.support.model import assert_same_gradients

CASES = "tests.features.operators.fused_modules"
RECOMPUTED = {"recompute_norm": True, "recompute_activation_function": True}
PLAIN = {"as it is": {}}
RUNS = {
    **PLAIN,
    "Megatron's own fusion": {"overrides": {"bias_activation_fusion": True}},
    "YaRN": {"overrides": {"rope_type": "yarn"}},
    "zero-centered norms": {"overrides": {"layernorm_zero_centered_gamma": True}},
    "recomputed": {"switches": RECOMPUTED},
    "fused DSA": {"switches": {"use_fused_dsa": True}},
}
IN_TWO = {name: RUNS[name] for name in ("as it is", "recomputed")}


def check(found, runs, operators=tuple(FUSED_OPERATORS)):
    """Check losses and gradients of every rank, and that exactly the fused operators run."""
    for rank in found:
        for name in runs:
            ours, theirs = rank[name]["ours"], rank[name]["theirs"]
            for one, other in zip(ours["losses"], theirs["losses"], strict=True):
                assert float(one) == pytest.approx(float(other), rel=2e-5), name
            assert_same_gradients(ours["gradients"], theirs["gradients"], rtol=2e-4)
            for operator, event in FUSED_OPERATORS.items():
                assert event not in theirs["counts"], name
                # A middle stage has no vocabulary.
                if operator != "mask-arithmetic" or ours["losses"]:
                    assert (event in ours["counts"]) == (operator in operators), (name, operator)
            if name == "recomputed":
                for feature in ("recompute-norm", "recompute-activation-function"):
                    assert ours["counts"][EVENTS[feature]] == theirs["counts"][EVENTS[feature]] > 0


@pytest.mark.full
def test_one_process(pool):
    check(pool.run(f"{CASES}:beside_stock", 1, runs=RUNS), RUNS)


@pytest.mark.parametrize(
    ("ranks", "layout", "runs"),
    [
        pytest.param(2, {"tp": 2}, IN_TWO, id="TP2+SP"),
        pytest.param(2, {"ep": 2}, IN_TWO, id="EP2", marks=pytest.mark.full),
        pytest.param(
            4, {"tp": 2, "ep": 2, "etp": 1, "pp": 2}, PLAIN, id="TP2+SP, EP2, PP2", marks=pytest.mark.full
        ),
    ],
)
def test_layouts(pool, ranks, layout, runs):
    check(pool.run(f"{CASES}:beside_stock", ranks, runs=runs, **layout), runs)


@pytest.mark.full
@pytest.mark.parametrize("operator", FUSED_OPERATORS)
def test_each_operator_alone(pool, operator):
    check(pool.run(f"{CASES}:beside_stock", 1, runs=PLAIN, operators=[operator]), PLAIN, (operator,))


def test_megatron_calls_ours_and_stock_is_restored(pool):
    (result,) = pool.run(f"{CASES}:consumers", 1)
    assert all("features/operators/" in home for home in result["with"]), result["with"]
    assert not any("features/operators/" in home for home in result["after"])
    assert result["norm"] == "FusedRMSNorm"
    assert result["state"] == ["weight"]
    assert result["zero centered"] == [0.0] * 8
    assert result["sequence parallel"] is False


def test_experts_have_one_activation_and_the_same_bits(pool):
    (results,) = pool.run(f"{CASES}:experts", 1)
    calls = {name: (result["activations"], result["linear layers"]) for name, result in results.items()}
    # Experts without rows call nothing.
    assert calls == {
        "none": (1, 0),
        "on a linear layer": (1, 4),
        "on an expert": (3, 8),
        "apart": (3, 8),
    }
    for name, result in results.items():
        for ours, theirs in zip(result["tensors"], results["apart"]["tensors"], strict=True):
            assert torch.equal(ours, theirs), name


def test_experts_that_differ_in_more_than_weights_are_called_one_by_one(pool):
    (found,) = pool.run(f"{CASES}:experts_that_differ", 1)
    for name, (ours, theirs) in found.items():
        assert all(map(torch.equal, ours, theirs)), name


def test_documents_of_a_pack_begin_at_position_zero(pool):
    (result,) = pool.run(f"{CASES}:packs", 1)
    assert result["ours"].keys() == result["theirs"].keys()
    for name, theirs in result["theirs"].items():
        assert result["ours"][name].equal(theirs), name
    assert result["counts"][FUSED_OPERATORS["rotary-pos-emb"]] >= len(result["theirs"])


def test_vocabulary_by_filling_is_the_same_bits_without_lists_of_places(pool):
    for rank in pool.run(f"{CASES}:vocabulary", 2):
        ours, theirs = rank["ours"], rank["theirs"]
        dispatched = {side: found.pop("dispatched") for side, found in rank.items()}
        for name, tensors in theirs.items():
            for one, other in zip(ours[name], tensors, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=name)
        # Remaining index_put calls go by row and column, in the gradients of the losses.
        assert dispatched["theirs"].count("aten.index_put_.default") > dispatched["ours"].count(
            "aten.index_put_.default"
        )
        assert "aten.masked_fill_.Scalar" in dispatched["ours"]
        assert "aten.nonzero.default" not in dispatched["ours"]


@pytest.mark.full
def test_every_memory_feature_changes_no_bit_of_them(pool):
    """Memory features change no bit with fused operators, including RMSNorm as one operator."""
    (alone,) = pool.run(f"{CASES}:pair", 1, switches=ALL)
    for feature, switches in MEMORY.items():
        (both,) = pool.run(f"{CASES}:pair", 1, switches={**ALL, **switches})
        for what in ("records", "weights", "masters", "moments"):
            assert both[what] == alone[what], f"{feature}: {what} differ"
        for name, event in EVENTS.items():
            assert (event in both["counts"]) == (name == feature), f"{feature}: {event}?"
        for event in FUSED_OPERATORS.values():
            assert event in both["counts"], f"{feature}: {event}?"
