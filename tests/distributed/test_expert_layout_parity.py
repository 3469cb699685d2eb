"""The main job with its experts laid out otherwise is the same training as one process."""

from __future__ import annotations

import pytest

from tests.distributed.parity import EP2, SHALLOW, TP2, Lab, Layout

EXTENDED = {"moe_tp_extend_ep": True}


@pytest.mark.parametrize(
    "layout",
    [
        Layout("TP2+SP, experts over its ranks", 2, TP2, SHALLOW, switches=EXTENDED),
        pytest.param(
            Layout("TP2+SP x EP2, experts over all ranks", 4, f"{TP2} {EP2}", switches=EXTENDED),
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda layout: layout.name,
)
def test_experts_over_tensor_parallel_ranks(lab: Lab, layout: Layout) -> None:
    lab.check(layout)


@pytest.mark.full
def test_it_is_megatrons_own_layout_without_expert_tensor_parallelism(lab: Lab) -> None:
    """Bit for bit; the sliced experts of the same command line without the flag add up otherwise."""
    own = lab.run(Layout("TP2+SP, EP2, ETP1", 2, f"{TP2} {EP2} --expert-tensor-parallel-size 1"))
    extended = lab.run(Layout("TP2+SP, experts over its ranks", 2, TP2, switches=EXTENDED))
    sliced = lab.run(Layout("TP2+SP", 2, TP2))
    assert all(extended.weights[name].equal(weight) for name, weight in own.weights.items())
    assert not all(extended.weights[name].equal(weight) for name, weight in sliced.weights.items())
