"""Paired forwards and backwards train as the stock schedule does, from the same weights."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.schedule import beside
from tests.support.memory_events import EVENTS, STARTED
from tests.support.model import assert_same_gradients, losses_of

CASES = "tests.features.pipeline.fb_overlap.paired_steps"
NO_SHARED = {"moe_shared_expert_intermediate_size": None}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
INTERLEAVED = {"pp": 2, "vpp": 2}
SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mla_up_proj", "mlp", "shared_experts", "layernorm"],
}
VERIFIED = {"recompute_verify": True}
RECOMPUTED = {"recompute_norm": True, "recompute_activation_function": True, **VERIFIED}
SWAPPED = {
    "swap_attention": True,
    "swap_modules": "input_norm,self_attention,post_attention_norm",
    "swap_attention_min_bytes": 0,
}
STATE = ("records", "weights", "masters", "moments")
SWAPPING = EVENTS["swap-attention"]
RUNS = {
    # name: ranks, layout, microbatches, overrides, other switches
    "first layer dense": (2, {}, 3, {"num_layers": 3}, {}),
    "last layer dense": (2, {}, 2, {"num_layers": 3, "moe_layer_freq": [1, 1, 0], **NO_SHARED}, {}),
    "one expert per rank": (2, {}, 2, {"num_moe_experts": 2, "moe_shared_expert_gate": True}, {}),
    "PP2 x VPP2": (4, INTERLEAVED, 4, {"num_layers": 4}, {}),
    "PP2 x VPP2, all in warm-up": (4, INTERLEAVED, 2, {"num_layers": 4}, {}),
    "PP2 x VPP2, a rest": (4, INTERLEAVED, 5, {"num_layers": 4, "microbatch_group_size_per_vp_stage": 3}, {}),
    "PP4 x VPP2": (8, {"pp": 4, "vpp": 2}, 8, {"num_layers": 8}, {}),
    "PP4 x VPP2, all in warm-up": (8, {"pp": 4, "vpp": 2}, 4, {"num_layers": 8}, {}),
    "one microbatch": (2, {}, 1, {}, {}),
    "padded to capacity": (2, {}, 2, PADDED, {}),
    "TP2+SP": (2, {"tp": 2}, 2, {"moe_shared_expert_gate": True}, {}),
    "multi-token prediction": (4, INTERLEAVED, 4, {"num_layers": 4, "mtp_num_layers": 1}, {}),
    "fused DSA": (2, {}, 2, {}, {"use_fused_dsa": True}),
    "one stage, multi-token prediction": (2, {}, 3, {"mtp_num_layers": 1}, {}),
    "recomputed modules": (2, {}, 3, {"num_layers": 3, **SELECTIVE}, VERIFIED),
    "recomputed modules, gated": (2, {}, 2, {**SELECTIVE, "moe_shared_expert_gate": True}, VERIFIED),
    "recomputed modules, none shared": (2, {}, 2, {**SELECTIVE, **NO_SHARED}, VERIFIED),
    "recomputed layernorm": (2, {}, 2, SELECTIVE, {"recompute_modules": SELECTIVE["recompute_modules"]}),
    "recomputed norms and activations": (2, {}, 3, {"num_layers": 3}, RECOMPUTED),
    "recomputed, PP2 x VPP2": (4, INTERLEAVED, 4, {"num_layers": 4, "mtp_num_layers": 1}, RECOMPUTED),
    "swapped": (2, {}, 3, {"num_layers": 3}, SWAPPED),
    "swapped, recomputed, PP2 x VPP2": (4, INTERLEAVED, 4, {"num_layers": 8}, {**SWAPPED, **RECOMPUTED}),
    "grouped experts": (2, {}, 2, {"moe_grouped_gemm": True}, {"moe_grouped_gemm": True}),
    "grouped experts, recomputed": (
        2,
        {},
        2,
        {"moe_grouped_gemm": True, "recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
        {"moe_grouped_gemm": True, **VERIFIED},
    ),
}
QUICK = ["PP2 x VPP2", "one stage, multi-token prediction"]


def memory_events_of(result):
    """Return memory feature events; for swapping only whether it ran, because a node holds a piece's
    input.
    """
    counts = {name: count for name, count in result["counts"].items() if name in EVENTS.values()}
    return {**counts, SWAPPING: counts.get(SWAPPING, 0) > 0}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in RUNS]
)
def test_losses_and_gradients(pool, tmp_path, name):
    """Training agrees with stock, in the simulator's order of events."""
    ranks, layout, microbatches, overrides, others = RUNS[name]
    trace = {"trace_schedule": str(tmp_path), "trace_schedule_step": 1}
    off, on = (
        pool.run(
            f"{CASES}:trained",
            ranks,
            switches={**others, **switches},
            overrides=overrides,
            num_microbatches=microbatches,
            micro_batch_size=1,
            ep=2,
            etp=1,
            **layout,
        )
        for switches in ({}, {"moe_fb_overlap": True, **trace})
    )
    for before, after in zip(off, on, strict=True):
        assert before["events"] == []
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
        assert memory_events_of(after) == memory_events_of(before)
        assert any(memory_events_of(after).values()) == ("recomputed" in name or "swapped" in name)
    assert any("launch" in rank["events"] for rank in on)
    comparison = beside.compare(tmp_path, Megatron())
    assert comparison.other_order == []
    assert comparison.simulated.schedule.name.endswith("paired, +1 warmup")
    pairs = [
        event for events in comparison.recorded.schedule.ranks for event in events if event.pair is not None
    ]
    # A single microbatch has no other to be paired with.
    assert bool(pairs) == (microbatches > 1)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.full
@pytest.mark.parametrize("recomputed", [{}, FULL], ids=["", "again"])
@pytest.mark.parametrize("distributed", [False, True])
def test_three_steps_of_overlapped_reduction(pool, distributed, recomputed):
    """Every parameter is ready as often as in stock; an evaluation afterwards runs no pairs."""
    for rank in pool.run(f"{CASES}:three_steps", 2, distributed=distributed, **recomputed):
        ours, theirs = rank["ours"], rank["theirs"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert_same_gradients(ours["gradients"], theirs["gradients"], rtol=1e-5)
        assert ours["golden"] == theirs["golden"]
        transfers = 8 if recomputed else 6  # of the one MoE layer
        assert rank["launched"] == 3 * 3 * transfers  # steps x microbatches


@pytest.mark.full
@settings(max_examples=6, deadline=None, derandomize=True)
@given(chunks=st.integers(2, 3), wider=st.integers(0, 1), groups=st.integers(1, 2), rest=st.integers(0, 3))
def test_no_shape_deadlocks(pool, tmp_path_factory, chunks, wider, groups, rest):
    """For every PP2 shape that stock accepts, all ranks finish their lists, in the simulator's order."""
    group = 2 + wider
    rest %= group
    folder = tmp_path_factory.mktemp("step")
    pool.run(
        f"{CASES}:trained",
        4,
        timeout_s=120,
        switches={"moe_fb_overlap": True, "trace_schedule": str(folder), "trace_schedule_step": 1},
        overrides={"num_layers": 2 * chunks, "microbatch_group_size_per_vp_stage": group},
        # Stock refuses a last group with fewer microbatches than ranks.
        num_microbatches=groups * group + (rest if rest >= 2 else 0),
        micro_batch_size=1,
        ep=2,
        etp=1,
        pp=2,
        vpp=chunks,
    )
    assert beside.compare(folder, Megatron()).other_order == []


@pytest.mark.full
def test_what_stock_refuses_stays_refused(pool):
    """A last group with fewer microbatches than pipeline ranks is refused by stock and by pairs."""
    stock, ours = (
        pool.run(
            "tests.support.model:error_of",
            4,
            case=f"{CASES}:trained",
            switches=switches,
            overrides={"num_layers": 4},
            num_microbatches=3,
            micro_batch_size=1,
            ep=2,
            etp=1,
            **INTERLEAVED,
        )
        for switches in ({}, {"moe_fb_overlap": True})
    )
    assert stock == ours
    assert all(error.startswith("RuntimeError") for error in stock)


@pytest.mark.full
def test_evaluation_in_a_pipeline(pool):
    """Forward-only steps use the model's plain forward: the same bits, and no split transfers."""
    for rank in pool.run(f"{CASES}:evaluated", 4):
        assert rank["ours"] == rank["theirs"]
        assert rank["launched"] == 0
    assert rank["theirs"] != []  # on the last stage


@pytest.mark.full
def test_an_embedding_with_two_backwards_per_microbatch(pool):
    """Overlapped reduction waits for both backwards of an embedding that the prediction layer uses, too."""
    for found in pool.run(f"{CASES}:three_steps", 2, distributed=True, mtp_num_layers=1):
        ours, theirs = found["ours"], found["theirs"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert_same_gradients(ours["gradients"], theirs["gradients"], rtol=1e-5)


OPTIMIZERS = {
    "reuse-fp32-param": {"reuse_fp32_param": True},
    "swap-optimizer": {"swap_optimizer": True},
    "virtual-optimizer": {"virtual_optimizer": ["all"]},
}


@pytest.mark.full
def test_features_of_the_optimizer_change_nothing(pool):
    """Results are bit-identical with overlapped gradient reduction and weight gathering."""

    def run(**switches):
        return pool.run(
            f"{CASES}:optimized",
            2,
            switches={"moe_fb_overlap": True, **switches},
            steps=3,
            distributed=True,
            overlap=True,
        )

    alone = run()
    for name, switches in OPTIMIZERS.items():
        for on, off in zip(run(**switches), alone, strict=True):
            assert on["counts"][STARTED] == off["counts"][STARTED] > 0
            assert on["counts"][EVENTS[name]] > 0
            assert [on[what] for what in STATE] == [off[what] for what in STATE], name
