"""What the simulator says of Megatron's interleaved schedules, with and without pairs."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.registry import Metrics
from mindspeed_dsa.context import Megatron
from mindspeed_dsa.schedule.costs import Costs
from mindspeed_dsa.schedule.megatron_order import schedule
from mindspeed_dsa.schedule.report import Figures, figures
from mindspeed_dsa.schedule.simulate import simulate

LAYOUTS = {
    # name: pipeline ranks, chunks, microbatches, group
    "PP4 x VPP2, 8 microbatches": (4, 2, 8, 4),
    "PP16 x VPP2, 64 microbatches": (16, 2, 64, 16),
    "PP16 x VPP2, 60 microbatches in groups of 20": (16, 2, 60, 20),
}
THIRD = Costs(all_to_all_forward=0.5, all_to_all_backward=1.0)
"""Forward 1, backward 2, all-to-all a third of the serial time."""


def entries() -> dict[str, Metrics]:
    """Step times and shares by layout; a chunk's forward takes 1."""
    return {name: _layout(*layout) for name, layout in LAYOUTS.items()}


def _layout(ranks: int, chunks: int, microbatches: int, group: int) -> Metrics:
    def of(costs: Costs, paired: bool, extra_warmup: bool = False) -> Figures:
        order = schedule(
            Megatron(), ranks, chunks, microbatches, group, paired=paired, extra_warmup=extra_warmup
        )
        return figures(simulate(order, costs), costs)

    serial, pairs, extra = of(THIRD, False), of(THIRD, True), of(THIRD, True, True)
    return {
        "step_without_all_to_all": of(Costs(), False).step_time,
        "step_stock": serial.step_time,
        "step_pairs": pairs.step_time,
        "step_pairs_extra_warmup": extra.step_time,
        "step_pairs_extra_warmup_half_hidden_alone": of(
            replace(THIRD, hidden_alone=0.5), True, True
        ).step_time,
        "steady_hidden_worst_rank_pairs": pairs.steady_hidden_worst or 0.0,
        "steady_hidden_worst_rank_pairs_extra_warmup": extra.steady_hidden_worst or 0.0,
        "extra_chunks_in_flight": max(extra.chunks_in_flight) - max(serial.chunks_in_flight),
    }
