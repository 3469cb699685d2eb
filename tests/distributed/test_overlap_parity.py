"""The main job with tensor parallel communication in chunks is the same training as without."""

from __future__ import annotations

import pytest

from tests.distributed.parity import EP2, HEADING, PP2, TP2, ZERO, Bounds, Lab, Layout
from tests.support.figures import tell
from tests.support.memory_events import CHUNKED, CHUNKED_SUM, MEASURED

CHUNKS = {"coc_parallel_num": 4}
TUNED = {"use_ascend_coc": True}
KEPT = {"coc_parallel_num": 2, "coc_recompute_all_gather": False}
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
DENSE = "--num-experts 0 --moe-shared-expert-intermediate-size 0"  # experts train with SP only
BESIDE_STOCK = Bounds(loss=1e-6, grad_norm=1e-6, first_gradient=1e-6, last_gradient=5e-5, update=5e-4)
"""Beside the same layout in stock's way: the order of a few sums is all that differs."""

LAYOUTS = (
    Layout("overlapped, 2 chunks, input kept: TP2+SP", 2, TP2, switches=KEPT),
    Layout("overlapped, tuned: TP2+SP", 2, f"{TP2} --no-deterministic-mode", switches=TUNED),
    Layout("overlapped, 4 chunks: TP4+SP", 4, TP4, switches=CHUNKS),
    Layout("overlapped, 4 chunks: TP2+SP, PP2", 4, f"{TP2} {PP2}", switches=CHUNKS),
    Layout("overlapped, 4 chunks: TP2+SP, EP2", 4, f"{TP2} {EP2}", switches=CHUNKS),
    Layout("overlapped, 4 chunks: TP2+SP, DP2, distributed optimizer", 4, f"{TP2} {ZERO}", switches=CHUNKS),
    Layout("overlapped, 4 chunks, MTP: TP2+SP", 2, TP2, model="--mtp-num-layers 1", switches=CHUNKS),
    Layout("overlapped, 4 chunks, fused DSA: TP2+SP", 2, TP2, switches={**CHUNKS, "use_fused_dsa": True}),
    Layout(
        "overlapped, 4 chunks, recomputed: TP2+SP",
        2,
        TP2,
        switches={**CHUNKS, "recompute_activation_function": True, "recompute_norm": True},
    ),
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "model", "chunks"),
    [
        (TP2, "", 4),
        (TP2, "", 2),
        (TP2, "", 8),
        (TP4, "", 4),
        ("--tensor-model-parallel-size 2", DENSE, 4),
    ],
    ids=["TP2+SP", "TP2+SP, 2 chunks", "TP2+SP, 8 chunks", "TP4+SP", "TP2 without SP, dense"],
)
def test_chunks_beside_stock(lab: Lab, flags: str, model: str, chunks: int) -> None:
    """Losses, gradients and updates of five steps."""
    ranks = 4 if flags == TP4 else 2
    stock, overlapped = (
        lab.run(Layout(name, ranks, flags, model=model, switches=switches))
        for name, switches in (("stock", {}), ("overlapped", {"coc_parallel_num": chunks}))
    )
    event = CHUNKED if "--sequence-parallel" in flags else CHUNKED_SUM
    assert stock.memory[event] == 0
    assert overlapped.memory[event] > 0
    name = f"overlapped, {chunks} chunks: {flags} {model}, beside stock"
    comparison = lab.compare(Layout(name, ranks, flags, model=model), overlapped, stock)
    tell(HEADING, str(comparison))
    assert not comparison.violations(BESIDE_STOCK)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_trains_as_one_process(lab: Lab, layout: Layout) -> None:
    outcome = lab.check(layout)
    assert outcome.memory[CHUNKED] > 0
    assert (outcome.memory[MEASURED] > 0) == (layout.switches is TUNED)
