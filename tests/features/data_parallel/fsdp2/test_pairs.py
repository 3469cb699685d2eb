"""Sharded weights with forward and backward in pairs, and deferred weight gradients."""

from __future__ import annotations

import pytest

from tests.features.data_parallel.fsdp2.pairs_cases import MICROBATCHES, STEPS
from tests.support.pool import CaseError

CASES = "tests.features.data_parallel.fsdp2.pairs_cases"
WITHOUT = {"fsdp2_prefetch": 0}
PAIRS = {"moe_fb_overlap": True}
NESTED = """
sub_modules_to_wrap: [megatron.core.transformer.multi_latent_attention.MLASelfAttention]
reshard_after_forward: false
"""
ALONE = {"mtp_num_layers": None}  # without a pipeline, Megatron's pairs have no multi-token prediction
FIRST, MIDDLE, LAST = "decoder.layers.0", "decoder.layers.1", "mtp.layers.0"


@pytest.fixture(scope="module")
def paired(pool):
    return pool.run(f"{CASES}:train", 2, switches={**PAIRS, **WITHOUT})


def test_pairs_train_as_layers_do(pool, paired):
    """Pairs train as unpaired layers do, with several microbatches, clipping and multi-token prediction."""
    for whole, ours in zip(pool.run(f"{CASES}:train", 2, switches=WITHOUT), paired, strict=True):
        assert_same_training(ours, whole)
        assert not whole["late"]


@pytest.mark.full
@pytest.mark.parametrize("text", ["sharding_size: 2", "reshard_after_forward: 2"])
def test_so_they_do_where_weights_lie_on_fewer_ranks(pool, tmp_path, text):
    (file := tmp_path / "fsdp2.yaml").write_text(text)
    runs = [
        pool.run(f"{CASES}:train", 4, switches={**switches, "fsdp2_config_path": str(file)})
        for switches in ({}, PAIRS)
    ]
    for whole, ours in zip(*runs, strict=True):
        assert_same_training(ours, whole)
        assert set(ours["late"]) == {FIRST, MIDDLE, LAST}


@pytest.mark.full
@pytest.mark.parametrize("grouped", [False, True])
def test_so_they_do_with_sharded_experts(pool, grouped):
    """Experts are gathered and reduced as often as their layer's dense weights."""
    switches = {"fsdp2_shard_experts": True, "moe_grouped_gemm": grouped, **WITHOUT}
    runs = [
        pool.run(
            f"{CASES}:train",
            4,
            switches={**switches, **more},
            overrides={"moe_grouped_gemm": grouped},
        )
        for more in ({}, PAIRS)
    ]
    rounds = STEPS * MICROBATCHES
    for whole, ours in zip(*runs, strict=True):
        assert_same_training(ours, whole)
        # The layer with experts has two param groups, dense and expert.
        assert ours["reductions"] == {
            FIRST: rounds,
            MIDDLE: 2 * rounds,
            LAST: 2 * rounds,
            **dict.fromkeys(ours["reductions"].keys() - {FIRST, MIDDLE, LAST}, rounds),
        }
        assert ours["gathers"][MIDDLE] == 2 * (MICROBATCHES + 1) * STEPS


@pytest.mark.full
def test_so_they_do_where_all_layers_run_again(pool):
    """Recomputing a layer before its backward reuses the experts gathered for the pair."""
    recomputed = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "moe_grouped_gemm": True,
    }
    switches = {"fsdp2_shard_experts": True, "moe_grouped_gemm": True}
    runs = [
        pool.run(f"{CASES}:train", 4, switches={**switches, **more}, overrides=recomputed)
        for more in ({}, PAIRS)
    ]
    for whole, ours in zip(*runs, strict=True):
        assert_same_training(ours, whole)


def assert_same_training(ours, whole):
    for before, after in zip(whole["records"], ours["records"], strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)
        assert after["norm"] == pytest.approx(before["norm"], rel=1e-6)
    assert after["evaluated"] == pytest.approx(before["evaluated"], rel=1e-5)
    for name, weight in whole["weights"].items():
        assert (ours["weights"][name] - weight).abs().max() < 1e-5, name  # updates are about 6e-3


def test_weights_go_before_their_gradients_come(paired):
    rounds = STEPS * MICROBATCHES
    for rank in paired:
        # Two weights of a dense MLP, and eight of attention: three sharded ones, five full ones. The
        # attention of the predicting layer is of another kind and has more weights.
        assert rank["late"] == {FIRST: 10 * rounds, MIDDLE: 8 * rounds, LAST: 16 * rounds}
        assert set(rank["alive"]) == {0}, "no layer's weights are kept for them"
        assert rank["early"] == [], "nothing is reduced before they are there"
        assert set(rank["reductions"].values()) == {rounds}, "each unit once for each microbatch"
        # Gathers per microbatch: two, but one for the middle layer, which a pair uses in both directions. The
        # rest is gathered as long as either direction runs.
        assert {name: rank["gathers"][name] for name in (FIRST, MIDDLE, LAST, "rest")} == {
            FIRST: 2 * rounds,
            MIDDLE: (MICROBATCHES + 1) * STEPS,
            LAST: 2 * rounds,
            "rest": rounds,
        }


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [
        {"switches": {"fsdp2_prefetch": 2}, "fails": True},
        pytest.param({"switches": {}, "late": False}, marks=pytest.mark.full),
        pytest.param({"switches": {}, "file": NESTED}, marks=pytest.mark.full),
    ],
    ids=["gathered ahead, a failed step", "gradients at once", "units in units"],
)
def test_neither_delay_nor_gathers_change_a_bit(pool, tmp_path, paired, how):
    arguments = {**how, "switches": {**PAIRS, **how["switches"]}}
    if text := arguments.pop("file", ""):
        (file := tmp_path / "fsdp2.yaml").write_text(text)
        arguments["switches"]["fsdp2_config_path"] = str(file)
    for reference, ours in zip(paired, pool.run(f"{CASES}:train", 2, **arguments), strict=True):
        assert ours["records"] == reference["records"]
        assert all(weight.equal(reference["weights"][name]) for name, weight in ours["weights"].items())
        assert bool(ours["late"]) == how.get("late", True)
        assert (ours["failed"] > 0) == how.get("fails", False)
        if how["switches"]:
            # Two layers' weights stay gathered for the next pair, which runs them in the other direction.
            assert ours["gathers"][FIRST] < reference["gathers"][FIRST]


def test_a_unit_that_no_pair_calls_is_refused(pool, tmp_path):
    (file := tmp_path / "fsdp2.yaml").write_text(
        "sub_modules_to_wrap: [megatron.core.transformer.moe.moe_layer.MoELayer]"
    )
    with pytest.raises(CaseError, match="SettingsError: fsdp2: a schedule of pairs never calls MoELayer"):
        pool.run(f"{CASES}:train", 2, switches={**PAIRS, "fsdp2_config_path": str(file)})


@pytest.mark.full
def test_megatrons_own_order_of_parts(pool):
    # Megatron's order of parts supports 16-bit weights only.
    alone, pairs = (
        pool.run(f"{CASES}:train", 2, switches={}, precision="bf16", overrides=overrides)
        for overrides in (ALONE, {**ALONE, "overlap_moe_expert_parallel_comm": True})
    )
    for whole, ours in zip(alone, pairs, strict=True):
        before, after = whole["records"][0], ours["records"][0]
        assert after["loss"] == before["loss"]
        assert after["norm"] == pytest.approx(before["norm"], rel=1e-3)
        assert ours["gathers"] != whole["gathers"], "a pair gathers once for both directions"
