"""LoRA beside fused DSA: adapters on the projections of latent attention and of the indexer."""

from __future__ import annotations

import re

import pytest
import torch

from tests.features.dsa.adapter_cases import DOWN, INDEXER, UP
from tests.support.model import WITHOUT_EXPERTS, assert_same_gradients, losses_of, put_together

CASES = "tests.features.dsa.adapter_cases"
ABSORBED = {"use_fused_dsa": True, "use_dsa_absorb": True}
BY_HEAD = {"use_fused_dsa": True, "use_dsa_absorb": False}
LAYERS = {"peft": (*UP, *DOWN, *INDEXER), "bridge": (*UP, *INDEXER)}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]}


@pytest.fixture(scope="module")
def stock(pool):
    """Steps of Megatron's own attention, which calls every layer with its adapter."""
    return {kind: pool.run(f"{CASES}:step", 1, kind=kind, targets=LAYERS[kind])[0] for kind in LAYERS}


@pytest.mark.parametrize(
    ("ranks", "switches", "overrides"),
    [
        pytest.param(1, ABSORBED, {}, id="absorbed"),
        pytest.param(1, BY_HEAD, {}, id="by head"),
        pytest.param(1, ABSORBED, RECOMPUTED, id="recomputed"),
        pytest.param(2, ABSORBED, {}, id="two tensor parallel ranks"),
    ],
)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_adapter_gets_the_gradient_of_megatrons_own_attention(
    pool, stock, kind, ranks, switches, overrides
):
    arguments = {"kind": kind, "targets": LAYERS[kind], "switches": switches, "overrides": overrides}
    found = pool.run(f"{CASES}:step", ranks, tp=ranks, **arguments)
    assert losses_of(found[0]) == pytest.approx(losses_of(stock[kind]), rel=1e-5)
    gradients = put_together(found)
    assert {name.partition(".self_attention.")[2].partition(".lora_")[0] for name in gradients} >= {
        target for target in LAYERS[kind] if kind == "peft"
    }
    assert_same_gradients(gradients, put_together([stock[kind]]))


def test_the_weight_includes_active_adapters_only(pool):
    (differences,) = pool.run(f"{CASES}:states", 1)
    for state, (from_layer, from_base) in differences.items():
        assert from_layer < 1e-5, state
        assert (from_base == 0) == ("disabled" in state or "merged" in state), state
    assert len(differences) == 7


def test_an_adapter_does_not_hide_the_norm_of_the_latent_query(pool):
    ((plain, adapted),) = pool.run(f"{CASES}:latent_queries_of_indexer", 1)
    assert torch.equal(plain, adapted)


def test_absorbed_attention_of_megatron_reads_adapters(pool):
    """Megatron-core 0.19 and later."""
    assert pool.run(f"{CASES}:read_by_absorbed_attention", 1) == [[True, True, True]]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dropout", "the adapter 'default' drops 5% of its inputs.*set the adapter's dropout to 0"),
        ("DoRA", "its adapter is DoRA.*set use_dora to False"),
        ("bridge DoRA", "its adapter is DoRA"),
        ("variant", "the adapter 'default' is the variant Tanh; use plain LoRA"),
        ("bias", "the adapter 'default' has a bias; set lora_bias to False"),
        ("no matrices", "it is wrapped by PeftLayer with no low-rank matrices"),
        ("activation", "its adapter has the activation SiLU"),
        ("dropout in evaluation", ""),
    ],
)
def test_an_adapter_that_is_no_product_is_refused(pool, fault, message):
    (error,) = pool.run("tests.support.model:error_of", 1, case=f"{CASES}:refused", fault=fault)
    if message:
        message = f"^ValueError: dsa-absorb: linear_kv_up_proj: {message}.*, or add --no-use-dsa-absorb$"
    assert re.search(message, error) if message else error == ""


def test_frozen_indexers_get_no_gradient_and_their_loss_no_graph(pool):
    (found,) = pool.run(f"{CASES}:frozen_indexer", 1, switches=ABSORBED)
    assert found["graphs"] == [False, False]
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in found["trained"]}
    assert layers == set(UP)


@pytest.mark.parametrize(
    ("targets", "layout", "message"),
    [
        (
            DOWN,
            {"tp": 2, "sequence_parallel": False},
            "linear_kv_down_proj has an adapter.*--sequence-parallel",
        ),
    ],
)
def test_gradients_that_no_rank_would_sum_are_refused(pool, targets, layout, message):
    errors = pool.run(
        "tests.support.model:error_of",
        2,
        case=f"{CASES}:step",
        kind="peft",
        targets=targets,
        switches=ABSORBED,
        overrides=WITHOUT_EXPERTS,
        **layout,
    )
    assert all(re.search(message, error) for error in errors), errors
