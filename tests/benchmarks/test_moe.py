"""Conversion of measured times of MoE layers into metrics, and the cells that a run measures."""

from __future__ import annotations

import json

import pytest

from benchmarks.moe import CELLS, run
from benchmarks.moe.overlap import metrics
from benchmarks.moe.problem import Timing, summary

MILLISECONDS = {
    "stock": 1000.0,
    "overlapped": 850.0,
    "shared expert alone": 900.0,
    "no transfers": 800.0,
    "transfer of dispatch": 60.0,
    "transfer of combine": 50.0,
    "shared fc1": 50.0,
    "shared fc2": 20.0,
    "shared fc2 backward": 40.0,
    "shared fc1 backward": 90.0,
    "expert weight gradients": 100.0,
}


def test_hidden_fraction():
    times = {name: Timing(0.0, 0.1, value / 1e3) for name, value in MILLISECONDS.items()}
    result = metrics({"times": times, "deviation": 1e-8})
    json.dumps(result)
    covered = {"dispatch": 50, "combine": 20, "combine backward": 50, "dispatch backward": 60}
    assert result["coverable_milliseconds"] == pytest.approx(covered)
    assert result["a2a_hidden_fraction"] == pytest.approx(150 / 180)
    assert result["layer_speedup"] == pytest.approx(1000 / 850)
    assert result["transfers_over_step"] == pytest.approx(0.22)


def test_least_and_median():
    assert summary([Timing(3, 2), Timing(1, 5), Timing(9, 4)]) == Timing(1, 2, 3)


def test_cells_are_named():
    with pytest.raises(ValueError, match=f"moe has no cell overlapp; use {', '.join(CELLS)}"):
        run("cpu", only="overlapp")
