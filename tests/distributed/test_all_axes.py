"""All axes of parallelism at once: sixteen ranks train ten steps as one process does."""

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
"""TP2 x PP2 x CP2 x DP2. Experts are sliced over TP2 and distributed over EP2; two ranks hold each slice."""
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
    # FSDP2 with sharded experts, tensor, sequence, pipeline, expert and context parallelism.
    flags = f"{TP2} {PP2} {EP2} --context-parallel-size 2 {FULLY_SHARDED} {STACKED} {more}"
    name = f"FSDP2 x TP2+SP x {name} x EP2 x CP2"
    model = f"{SHALLOW} {FOUR_MICROBATCHES}"
    layout = Layout(name, RANKS, flags, model, switches={**SWITCHES, **switches})
    with WorkerPool(size=RANKS) as pool:
        lab = Lab(pool, tmp_path_factory.mktemp("all-axes"), steps=10, timeout_s=1500)
        outcome = lab.check(layout)
    # 10 steps x 4 microbatches x 8 ranks per stage, in forward and in backward.
    for event in (GATHERED, EXPERTS_GATHERED, GROUPED):
        assert outcome.memory[event] >= 10 * 4 * 8 * 2, event
    assert (outcome.memory[STARTED] > 0) == bool(switches)
