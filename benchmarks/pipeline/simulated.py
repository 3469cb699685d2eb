"""Simulated figures of Megatron's schedules: with and without pairs, and with full recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.registry import Metrics
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.schedule.events import Costs
from mindspeed_dsa.schedule.megatron_order import schedule
from mindspeed_dsa.schedule.report import Figures, figures
from mindspeed_dsa.schedule.simulate import simulate

Layout = tuple[int, int, int, int]
"""Pipeline ranks, chunks per rank, microbatches, size of a group of microbatches."""
PAIRED: dict[str, Layout] = {
    "PP1, 4 microbatches": (1, 1, 4, 1),
    "PP4 x VPP2, 8 microbatches": (4, 2, 8, 4),
    "PP16 x VPP2, 64 microbatches": (16, 2, 64, 16),
    "PP16 x VPP2, 60 microbatches in groups of 20": (16, 2, 60, 20),
}
RECOMPUTED: dict[str, Layout] = {
    "PP2, 4 microbatches": (2, 1, 4, 2),
    "PP2 x VPP2, 8 microbatches": (2, 2, 8, 2),
    "PP4, 8 microbatches": (4, 1, 8, 4),
    "PP16 x VPP2, 64 microbatches": (16, 2, 64, 16),
}
THIRD = Costs(all_to_all_forward=0.5, all_to_all_backward=1.0)
"""Forward 1, backward 2, all-to-all a third of the serial time."""


def run(link: str = "", quick: bool = False) -> Metrics:
    """Return the cell's entries; nothing is measured."""
    return {
        "simulated": {name: _pairs(layout) for name, layout in PAIRED.items()},
        "simulated_recompute": {name: _recompute(layout) for name, layout in RECOMPUTED.items()},
    }


def _figures(layout: Layout, costs: Costs, **options: Any) -> Figures:
    return figures(simulate(schedule(Megatron(), *layout, **options), costs), costs)


def _pairs(layout: Layout) -> Metrics:
    """Return step times and shares; a chunk's forward takes 1."""
    extra_warmup = {"paired": True, "extra_warmup": True}
    results = {
        "without all-to-all": _figures(layout, Costs()),
        "stock": _figures(layout, THIRD),
        "pairs": _figures(layout, THIRD, paired=True),
        "pairs, +1 warmup": _figures(layout, THIRD, **extra_warmup),
        "pairs, +1 warmup, half hidden alone": _figures(
            layout, replace(THIRD, hidden_alone=0.5), **extra_warmup
        ),
    }
    extra, stock = (results[name].chunks_in_flight for name in ("pairs, +1 warmup", "stock"))
    return {
        "step_time": {name: each.step_time for name, each in results.items()},
        "steady_a2a_hidden_worst_rank": {
            name: results[name].steady_hidden_worst or 0.0 for name in ("pairs", "pairs, +1 warmup")
        },
        "extra_chunks_in_flight": max(extra) - max(stock),
        "extra_microbatches_in_flight": (max(extra) - max(stock)) / layout[1],
    }


def _recompute(layout: Layout) -> Metrics:
    """Return step times with full recompute; a chunk's forward and its recomputation take 1 each."""
    plain, bubble = (
        _figures(layout, Costs(), recompute=where).step_time for where in ("in place", "in bubbles")
    )
    return {
        "step_time": {"recompute": plain, "recompute in bubbles": bubble},
        "recompute_in_bubble_removed": (plain - bubble) / (layout[0] - 1),
    }
