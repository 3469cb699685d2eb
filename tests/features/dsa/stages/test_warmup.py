from __future__ import annotations

import pytest

import mindspeed_dsa
from mindspeed_dsa.patches import SettingsError
from tests.support.model import assert_same_gradients

CASES = "tests.features.dsa.fused_cases"
SELECTED = {"dsa_indexer_topk": 6}


@pytest.fixture(scope="module")
def alone(pool):
    return pool.run(f"{CASES}:warmup", 1, overrides=SELECTED, steps=4)[0]


def test_only_indexers_are_trained_and_have_optimizer_state(alone):
    assert len(alone["trained"]) == 10
    assert all(".indexer." in name for name in alone["trained"])
    assert alone["gradient buffers"] == 10
    assert sorted(alone["changed"]) == sorted(alone["trained"])
    assert alone["optimizer elements"] == alone["trained elements"]


def test_the_indexers_learn_the_dense_attention(alone):
    losses = alone["indexer losses"]
    assert losses[-1] < 0.9 * losses[0]


def test_gradients_are_those_of_the_dense_loss_beside_dense_attention(pool, alone):
    (stock,) = pool.run(f"{CASES}:dense_attention_gradients", 1)
    assert_same_gradients(alone["gradients"], stock["gradients"])


@pytest.mark.parametrize("switches", [{"use_fused_dsa": True}, {"use_dsa_absorb": True}], ids=str)
def test_fused_switches_change_nothing(pool, alone, switches):
    (ours,) = pool.run(f"{CASES}:warmup", 1, switches=switches, overrides=SELECTED)
    assert ours["indexer losses"] == alone["indexer losses"][:1]


def test_a_second_stream_leaves_the_indexers_their_gradients(pool, alone):
    # In the warm-up, projections next to a layer have no graph, so no gradient may be expected there.
    (ours,) = pool.run(f"{CASES}:warmup", 1, switches={"two_streams": True}, overrides=SELECTED)
    assert_same_gradients(ours["gradients"], alone["gradients"])


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, pytest.param({}, marks=pytest.mark.full)], ids=str)
def test_layouts_have_the_gradients_of_one_process(pool, alone, layout):
    # Megatron's command line, unlike its config, frees outputs that the next stage has received.
    overrides = {**SELECTED, "deallocate_pipeline_outputs": True}
    ranks = pool.run(f"{CASES}:warmup", 2, overrides=overrides, **layout)
    trained = {name for rank in ranks for name in rank["trained"]}
    assert trained == set(alone["trained"])
    for rank in ranks:
        assert set(rank["changed"]) == set(rank["trained"])
    if layout:  # two data parallel ranks would see other samples
        for rank in ranks:
            expected = {name: alone["gradients"][name] for name in rank["gradients"]}
            assert_same_gradients(rank["gradients"], expected)


@pytest.mark.full
def test_virtual_stages(pool):
    four_layers = {**SELECTED, "num_layers": 4}
    (alone,) = pool.run(f"{CASES}:warmup", 1, overrides=four_layers)
    freed = {**four_layers, "deallocate_pipeline_outputs": True}
    ranks = pool.run(f"{CASES}:warmup", 2, overrides=freed, pp=2, vpp=2)
    gradients = {name: g for rank in ranks for name, g in rank["gradients"].items()}
    assert_same_gradients(gradients, alone["gradients"])


def test_mtp_layers_are_trained_and_frozen_alike(pool):
    (result,) = pool.run(f"{CASES}:warmup", 1, overrides={**SELECTED, "mtp_num_layers": 1}, mtp=True)
    assert len(result["trained"]) == 15
    assert sorted(result["changed"]) == sorted(result["trained"])


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        pytest.param(
            {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_recomputation_changes_nothing(pool, alone, recompute):
    (ours,) = pool.run(f"{CASES}:warmup", 1, overrides={**SELECTED, **recompute})
    assert ours["indexer losses"] == alone["indexer losses"][:1]
    assert_same_gradients(ours["gradients"], alone["gradients"])


SHARED = {**SELECTED, "num_layers": 4, "dsa_indexer_topk_freq": 4}
SERVED = {"use_fused_dsa": True, "dsa_indexer_loss_layers": "served"}


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        pytest.param(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            {},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            {},
            marks=pytest.mark.full,
        ),
        ({}, {"tp": 2}),
    ],
    ids=["full", "core", "TP2"],
)
def test_an_indexer_learns_the_dense_attention_of_all_layers_that_it_serves(pool, overrides, layout):
    (own,) = pool.run(f"{CASES}:warmup", 1, overrides=SHARED)
    (served,) = pool.run(f"{CASES}:warmup", 1, overrides=SHARED, switches=SERVED)
    assert served["trained"] == own["trained"]
    assert any(not own["gradients"][name].equal(gradient) for name, gradient in served["gradients"].items())
    result = pool.run(
        f"{CASES}:warmup", layout.get("tp", 1), overrides={**SHARED, **overrides}, switches=SERVED, **layout
    )[0]
    assert result["indexer losses"] == pytest.approx(served["indexer losses"][:1], rel=1e-6)
    assert_same_gradients(result["gradients"], served["gradients"])


def test_a_recomputed_input_norm_is_not_emptied_for_good(pool):
    plain, recomputed = (
        pool.run(f"{CASES}:{case}", 1, **more)[0]
        for case, more in (
            ("one_step", {"switches": {"dsa_stage": "warmup"}}),
            ("warmup_with_recomputed_norms", {}),
        )
    )
    expected = {name: gradient for name, gradient in plain["gradients"].items() if gradient is not None}
    assert len(expected) == 10
    assert_same_gradients(recomputed, expected)


def test_hardly_anything_is_kept_for_backward(pool):
    kept = f"{CASES}:saved_for_backward"
    warm, sparse = (pool.run(kept, 1, stage=stage, sequence=64)[0] for stage in ("warmup", "sparse"))
    assert warm < 0.4 * sparse


def test_a_stage_without_a_loss_is_refused():
    from types import SimpleNamespace

    with mindspeed_dsa.enabled(dsa_stage="warmup", experimental_attention_variant="dsa"):
        args = SimpleNamespace(
            experimental_attention_variant="dsa", dsa_indexer_loss_coeff=0.0, dsa_stage="warmup"
        )
        with pytest.raises(SettingsError, match="set --dsa-indexer-loss-coeff above 0"):
            mindspeed_dsa.validate(args)
