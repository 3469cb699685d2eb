"""Moved experts beyond the ranks that run here: one layer of DeepSeek-V3 on simulated links."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from benchmarks.registry import Metrics
from mindspeed_dsa.tools.planner.devices import DEVICES, Device
from mindspeed_dsa.tools.planner.expert_step import Layer, Links, compare, imbalanced

RANKS = (16, 32, 64, 128, 256)
IMBALANCES = (1.5, 2.0, 3.0)
CLUSTERS = {"h100": "nodes of 8", "a3": "super node"}
"""Device of the planner by its key in the results, with the kind of its cluster."""
WIDTHS, NETWORKS = (1024, 2048, 4096), (25, 50, 100, 200)
"""Widths of an expert, and GB/s between nodes; both with 64 ranks and an imbalance of 2."""


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries; the link is not used."""
    ranks = RANKS[:1] if quick else RANKS
    entries: dict[str, Any] = {
        "reach": {
            name: {
                f"EP{number}": {
                    f"{imbalance:g}": _steps(DEVICES[name], Layer(number), imbalance)
                    for imbalance in IMBALANCES
                }
                for number in ranks
            }
            for name in CLUSTERS
        }
    }
    if not quick:
        h100 = DEVICES["h100"]
        entries["reach_by_width"] = {
            name: {f"{width}": _steps(DEVICES[name], Layer(64, width=width), 2.0) for width in WIDTHS}
            for name in CLUSTERS
        }
        entries["reach_by_network"] = {
            f"{rate}": _steps(replace(h100, network=rate), Layer(64), 2.0) for rate in NETWORKS
        }
    print(f"reach: {entries}", file=sys.stderr, flush=True)
    return entries


def _steps(device: Device, layer: Layer, imbalance: float) -> dict[str, float]:
    counts = imbalanced(layer, imbalance)
    stock, ours = compare(layer, counts, device.tflops * device.matmul * 1e12, Links.of(device), limit=None)
    return {
        "moved": len(ours.plan.experts),
        "stock_milliseconds": 1e3 * stock.seconds,
        "balanced_milliseconds": 1e3 * ours.seconds,
        "predicted_milliseconds": 1e3 * ours.plan.after,
        "speedup": stock.seconds / ours.seconds,
        "imbalance_after": ours.plan.imbalance,
    }
