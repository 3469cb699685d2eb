"""A MoE layer that moves hot experts equals Megatron's, with fewer dispatched rows."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.features.moe.balanced_experts.popular_experts import ALWAYS, NEVER
from tests.support import model, optimizer_job
from tests.support.moe import assert_same
from tests.support.pool import CaseError

CASES = "tests.features.moe.balanced_experts.popular_experts"
EP2 = {"ep": 2}
AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
EXPERT = 3 * 32 * 16
"""Number of weights of one expert."""
SKEWED = [2.0, 1.0, 0.0, -1.0]
EIGHT = [3.0, 2.0, 2.0, 1.0, 1.0, 0.0, 0.0, -2.0]


def both(pool: Any, ranks: int, switches: Any = ALWAYS, **arguments: Any) -> tuple[Any, Any]:
    """Return all ranks' results without and with the feature, after checking that they agree."""
    stock, ours = (pool.run(f"{CASES}:train", ranks, switches=given, **arguments) for given in ({}, switches))
    for mine, theirs in zip(ours, stock, strict=True):
        assert_same(mine, theirs)
        # Each expert parallel group plans for its own tokens.
        assert mine["plans"] == ours[mine["first rank"]]["plans"]
    return stock, ours


def test_tokens_stay_and_weights_travel(pool):
    """Rows of moved experts are not dispatched; weights travel instead, and their gradients come back."""
    stock, ours = both(pool, 2, popularity=[SKEWED], **EP2)
    (plan,) = ours[0]["plans"]
    assert plan
    for rank in range(2):
        home = {2 * rank, 2 * rank + 1}
        # Tokens that the rank keeps because the expert comes to them.
        kept = sum(stock[rank]["counts"][0][expert] for expert in plan if expert not in home)
        assert kept > 0
        assert ours[rank]["dispatched"] == [stock[rank]["dispatched"][0] - kept]
        # Weights of its own experts, gradients of the other rank's.
        assert ours[rank]["sent"] == len(plan) * EXPERT


def test_one_line_says_when_experts_travel_and_none_where_they_never_do(pool):
    ours = pool.run(f"{CASES}:train", 2, switches=ALWAYS, popularity=[SKEWED, SKEWED], **EP2)
    (line,) = (line for rank in ours for line in rank["said"] if "travel" in line)
    assert f"experts {', '.join(map(str, ours[0]['plans'][0]))} travel to their tokens" in line
    never = pool.run(f"{CASES}:train", 2, switches=NEVER, popularity=[SKEWED], **EP2)
    assert not [line for rank in never for line in rank["said"] if "travel" in line]


@pytest.mark.parametrize(
    ("popularity", "arguments"),
    [
        pytest.param([[30.0, 20.0, -30.0, -30.0]], {}, marks=pytest.mark.full),
        ([[30.0, 0.0, 0.0, 0.0]], {"overrides": {"moe_router_topk": 1, "moe_router_pre_softmax": True}}),
        pytest.param([SKEWED], {"rows": (1, 1)}, marks=pytest.mark.full),
        pytest.param([SKEWED[::-1]], {"rows": (20, 0)}, marks=pytest.mark.full),
        ([SKEWED, SKEWED[::-1], [0.0] * 4], {"rows": (24, 16)}),
        pytest.param([EIGHT], {"overrides": {"moe_expert_capacity_factor": 1.0}}, marks=pytest.mark.full),
        pytest.param(
            [SKEWED],
            {"overrides": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
            marks=pytest.mark.full,
        ),
        ([EIGHT, EIGHT], {"tp": 2, "etp": 1}),
        pytest.param([EIGHT], {"frozen": (0, 1, 5)}, marks=pytest.mark.full),
        pytest.param([EIGHT], {"frozen": range(8)}, marks=pytest.mark.full),
    ],
    ids=(
        "two experts have all tokens",
        "one expert has all tokens",
        "one token",
        "a rank without tokens",
        "microbatches with different plans",
        "capacity",
        "recomputed",
        "TP2 with sequence parallelism",
        "some experts frozen",
        "all experts frozen",
    ),
)
def test_outputs_and_gradients_are_megatrons(pool, popularity, arguments):
    _, ours = both(pool, 2, popularity=popularity, **{**EP2, **arguments})
    assert any(ours[0]["plans"])
    # Each microbatch has a plan of its own.
    if len(popularity) > 2:
        assert len(set(ours[0]["plans"])) == len(popularity)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (4, {"ep": 4}),
        (4, {"ep": 4, "overrides": {"moe_shared_expert_overlap": True}}),
        (4, {"ep": 4, "overrides": {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None}}),
        (4, {"ep": 2, "tp": 2, "etp": 1}),
        (
            2,
            {"ep": 2, "overrides": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}},
        ),
    ],
    ids=("EP4", "EP4, shared expert overlap", "EP4, biases", "EP2 x TP2 x expert-DP2", "aux loss"),
)
def test_larger_layouts(pool, ranks, arguments):
    _, ours = both(pool, ranks, popularity=[EIGHT, EIGHT[::-1]], rows=(40,), **arguments)
    assert all(ours[0]["plans"])


@pytest.mark.full
def test_stacked_experts_travel_one_by_one(pool):
    """Grouped experts are moved one by one, and agree with Megatron's sequential experts."""
    arguments = {"popularity": [SKEWED, SKEWED[::-1]], **EP2}
    grouped = {"moe_grouped_gemm": True, "experimental_attention_variant": None}
    stock = pool.run(f"{CASES}:train", 2, switches={}, **arguments)
    ours = pool.run(
        f"{CASES}:train",
        2,
        switches={**ALWAYS, **grouped},
        overrides={"moe_grouped_gemm": True},
        **arguments,
    )
    for mine, theirs in zip(ours, stock, strict=True):
        assert_same(mine, theirs)
        assert all(mine["plans"])
        assert mine["sent"] == sum(map(len, mine["plans"])) * EXPERT


def test_nothing_moves_where_it_does_not_pay(pool):
    stock, ours = both(pool, 2, NEVER, popularity=[SKEWED], **EP2)
    for mine, theirs in zip(ours, stock, strict=True):
        assert (mine["plans"], mine["sent"]) == ([()], 0)
        # No expert moves, so the bits are the same.
        assert_same(mine, theirs, rtol=0)


def test_rates_are_measured_once_and_agree(pool):
    ranks = pool.run(f"{CASES}:measured", 2)
    assert ranks[0] == ranks[1]
    (rates,) = set(ranks[0]["rates"])
    assert rates[0] > 0
    assert rates[1] > 0
    assert ranks[0]["measurements"] == 1


def test_an_expert_that_is_frozen_in_part_is_refused(pool):
    errors = pool.run("tests.support.model:error_of", 2, case=f"{CASES}:partly_frozen")
    assert all("some weights of local expert 0 are frozen and some are not" in error for error in errors)


def test_experts_that_are_units_of_fsdp2_are_refused(pool, tmp_path):
    """FSDP2 frees the weights of such a unit while they are sent. It keeps those of layers."""
    (file := tmp_path / "fsdp2.yaml").write_text("reshard_after_forward: true")
    assert any(pool.run(f"{__name__}:sharded", 4, file=str(file))[0])
    file.write_text("sub_modules_to_wrap: [megatron.core.transformer.moe.experts.SequentialMLP]")
    with pytest.raises(CaseError, match="they are units of their own; remove their class from sub_modules"):
        pool.run(f"{__name__}:sharded", 4, file=str(file))


def sharded(file: str) -> list[Any]:
    """Take two steps of a job with sharded experts, and return the plans."""
    from mindspeed_dsa.features.moe.balanced_experts import layer

    switches = {"use_torch_fsdp2": True, "fsdp2_shard_experts": True, "fsdp2_config_path": file}
    model.start({**ALWAYS, **switches}, ep=2)
    plans: list[Any] = []
    choose = layer.choose

    def chosen(*arguments: Any) -> Any:
        plan = choose(*arguments)
        plans.append(plan.experts)
        return plan

    with mock.patch.object(layer, "choose", chosen):
        job = optimizer_job.assemble(precision="fp32", fsdp2=True, ep=2)
        for number in range(2):
            optimizer_job.step(job, number)
    return plans
