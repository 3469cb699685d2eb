"""Every axis of parallelism at once, sixteen ranks against one process: ten steps of the main job."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.flags import (
    EP2,
    FOUR_MICROBATCHES,
    FULLY_SHARDED,
    FUSED,
    GROUP,
    PAIRS,
    PP2,
    SHALLOW,
    STACKED,
    TP2,
    VPP2,
)
from tests.distributed.parity import Lab, Layout
from tests.support.memory_events import EXPERTS_GATHERED, GATHERED, GROUPED, STARTED
from tests.support.pool import WorkerPool

RANKS = 16
"""TP2 x PP2 x CP2 x DP2; experts are sliced over TP2, dealt out over EP2, and two ranks have the same."""
SWITCHES = {
    **FUSED,
    **GROUP,
    "context_parallel_size": 2,
    "use_torch_fsdp2": True,
    "fsdp2_shard_experts": True,
}


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "more", "switches"),
    [("PP2", "", {}), ("PP2 x VPP2, pairs", VPP2, PAIRS)],
    ids=["pipeline", "pairs"],
)
def test_all_axes_train_as_one_process(
    tmp_path_factory: pytest.TempPathFactory, name: str, more: str, switches: dict[str, Any]
) -> None:
    """FSDP2 with sharded experts, tensor and sequence, pipeline, expert and context parallelism."""
    flags = f"{TP2} {PP2} {EP2} --context-parallel-size 2 {FULLY_SHARDED} {STACKED} {more}"
    name = f"FSDP2 x TP2+SP x {name} x EP2 x CP2"
    model = f"{SHALLOW} {FOUR_MICROBATCHES}"
    layout = Layout(name, RANKS, flags, model, switches={**SWITCHES, **switches})
    with WorkerPool(size=RANKS) as pool:
        lab = Lab(pool, tmp_path_factory.mktemp("all-axes"), steps=10, timeout_s=1500)
        outcome = lab.check(layout)
    # Ten steps of four microbatches, on eight ranks of each stage, forward and backward.
    for event in (GATHERED, EXPERTS_GATHERED, GROUPED):
        assert outcome.memory[event] >= 10 * 4 * 8 * 2, event
    assert (outcome.memory[STARTED] > 0) == bool(switches)
