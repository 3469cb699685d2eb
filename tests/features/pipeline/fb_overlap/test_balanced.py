"""Moving hot experts in pairs: the same training as pairs without it, and bit-identical with
recomputation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.features.moe.balanced_experts import popular_experts
from tests.features.moe.balanced_experts.popular_experts import ALWAYS
from tests.features.moe.balanced_experts.test_chains import assert_links_carry_each_expert_once
from tests.features.pipeline.fb_overlap import recomputed_steps
from tests.features.pipeline.fb_overlap.test_recompute import INTERLEAVED, MOE, PAIRS, UNIFORM, step
from tests.support.memory_events import MOVED
from tests.support.model import assert_same_gradients, losses_of

GROUPED = {"moe_grouped_gemm": True}
RUNS = {
    # name: ranks, layout, microbatches, model, other switches
    "one stage": (2, {}, 3, {"num_layers": 3}, {}),
    "no shared expert": (2, {}, 2, {"moe_shared_expert_intermediate_size": None}, {}),
    "one expert per rank": (
        2,
        {},
        2,
        {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {},
    ),
    "EP4": (4, {"ep": 4}, 3, {"num_layers": 3, "num_moe_experts": 8}, {}),
    "TP2+SP": (2, {"tp": 2}, 3, {"num_layers": 3, "expert_tensor_parallel_size": 1}, {}),
    "PP2 x VPP2": (4, INTERLEAVED, 4, {"num_layers": 4}, {}),
    "multi-token prediction": (2, {}, 3, {"mtp_num_layers": 1}, {}),
    "grouped experts": (2, {}, 3, {"num_layers": 3, **GROUPED}, GROUPED),
}
QUICK = ("one stage",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in RUNS]
)
def test_losses_and_gradients(pool, name):
    """Results agree with pairs without moves; recomputed experts move their weights a second time."""
    moving = {**ALWAYS, "balanced_moe_hot_expert_num": 2}
    without, balanced = (step(pool, RUNS[name], {**PAIRS, **more}, {}) for more in ({}, moving))
    for before, after in zip(without, balanced, strict=True):
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
        assert before["counts"].get(MOVED, 0) == 0
    assert all(rank["counts"][MOVED] > 0 for rank in balanced)
    for recomputed in (UNIFORM, MOE):
        for once, twice in zip(
            balanced, step(pool, RUNS[name], {**PAIRS, **moving}, recomputed), strict=True
        ):
            assert twice["losses"] == once["losses"]
            assert all(
                torch.equal(each, once["gradients"][weight]) for weight, each in twice["gradients"].items()
            )
            assert twice["counts"][MOVED] == 2 * once["counts"][MOVED]


def watched(**arguments: Any) -> dict[str, Any]:
    """Run a step, and also return the plans and the bytes of the links."""
    with popular_experts.watched() as found:
        result = recomputed_steps.trained(**arguments)
    return {**result, **found}


@pytest.mark.full
def test_chains_of_four_ranks(pool):
    """Several chains in both directions of two microbatches, with the plans and results of layers alone."""
    _, layout, microbatches, model, _ = RUNS["EP4"]
    stock, alone, pairs = (
        pool.run(
            f"{__name__}:watched",
            4,
            switches=switches,
            overrides=model,
            num_microbatches=microbatches,
            micro_batch_size=1,
            etp=1,
            **layout,
        )
        for switches in ({}, ALWAYS, {**ALWAYS, **PAIRS})
    )
    for theirs, mine, ours in zip(stock, alone, pairs, strict=True):
        assert ours["plans"] == mine["plans"]
        for one in (theirs, mine):
            assert losses_of(ours) == pytest.approx(losses_of(one), rel=1e-6)
            assert_same_gradients(ours["gradients"], one["gradients"], rtol=1e-5)
    assert len(pairs[0]["plans"]) == 2 * microbatches
    assert max(map(len, pairs[0]["plans"])) > 2
    for ranks in (alone, pairs):
        assert_links_carry_each_expert_once(ranks)
    assert any(what.count(">") == 3 for rank in pairs for _, what in rank["links"])


@pytest.mark.full
@pytest.mark.parametrize("recomputed", [{}, UNIFORM], ids=["", "recomputed"])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_three_steps_of_overlapped_reduction(pool, ranks, distributed, recomputed):
    """No bucket is reduced before the gradients from other ranks arrive, and weights report as often as in
    stock.
    """
    for rank in pool.run(
        "tests.features.pipeline.fb_overlap.paired_steps:three_steps",
        ranks,
        distributed=distributed,
        switches={**ALWAYS, "balanced_moe_hot_expert_num": 2},
        **recomputed,
    ):
        ours, theirs = rank["ours"], rank["theirs"]
        assert rank["counts"][MOVED] > 0
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert_same_gradients(ours["gradients"], theirs["gradients"], rtol=1e-5)
        assert ours["golden"] == theirs["golden"]
