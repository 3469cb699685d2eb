"""Sharded weights where a forward and a backward run side by side, and weight gradients come late."""

from __future__ import annotations

import pytest
import torch

from tests.features.data_parallel.fsdp2.pairs_cases import MICROBATCHES, STEPS

CASES = "tests.features.data_parallel.fsdp2.pairs_cases"
WITHOUT = {"fsdp2_prefetch": 0}
PAIRS = {"moe_fb_overlap": True, "fsdp2_prefetch": 0}


def test_x(pool):
    import time

    runs = {}
    for name, args in {
        "alone": {"switches": WITHOUT},
        "pairs": {"switches": PAIRS},
        "ahead": {"switches": {**PAIRS, "fsdp2_prefetch": 2}, "late": False},
        "again": {"switches": {**PAIRS, "fsdp2_prefetch": 1}, "fails": True},
        "collectives": {"switches": {**PAIRS, "fsdp2_prefetch": 1}, "direct": False},
        "bf16": {"switches": WITHOUT, "precision": "bf16"},
        "stock": {
            "switches": {"fsdp2_prefetch": 1},
            "precision": "bf16",
            "overrides": {"overlap_moe_expert_parallel_comm": True},
        },
    }.items():
        t = time.time()
        runs[name] = pool.run(f"{CASES}:train", 2, **args)
        r = runs[name][0]
        print(name, time.time() - t, r["records"])
        print(r["gathers"], r["reductions"], r["late"], sorted(set(r["alive"])), r["early"], r["failed"])
        a, b = runs["alone"][0]["weights"], runs[name][0]["weights"]
        print(max((float((a[n] - b[n]).abs().max()), n) for n in a))
    assert 0
