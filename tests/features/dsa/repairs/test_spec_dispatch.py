from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.dsa.repairs.feature import FEATURE

CASES = "tests.features.dsa.parts_of_dsa"
ERROR = "tests.support.model:error_of"


def test_every_layer_gets_the_sparse_core_attention(pool):
    (names,) = pool.run(f"{CASES}:core_attentions", 1, switches={})
    assert names == ["DSAttention", "DSAttention"]


def test_without_the_repair_megatron_refuses(pool):
    (error,) = pool.run(
        ERROR, 1, case=f"{CASES}:core_attentions", switches={"no_dsa_repairs": "spec-dispatch"}
    )
    assert "Invalid experimental attention variant: dsa" in error


def test_what_megatron_does_not_know_it_still_refuses(pool):
    (message,) = pool.run(f"{CASES}:other_variant_still_refused", 1)
    assert "unheard_of" in message


def test_mtp_layers_train_their_indexers_and_are_tracked(pool):
    (step,) = pool.run(f"{CASES}:mtp_step", 1)
    trained = {name.split(".self_attention")[0] for name, g in step["gradients"].items() if g.abs().max() > 0}
    assert trained == {
        "decoder.layers.0",
        "decoder.layers.1",
        "mtp.layers.0.transformer_layer",
        "mtp.layers.1.transformer_layer",
    }
    assert step["reported"] == [1, 1, 1, 1]
    torch.testing.assert_close(step["metrics"]["indexer loss"], step["values"].sum() / 4)


def arguments(**changes):
    """Return a part of Megatron-LM's arguments for a valid model."""
    values = {
        "experimental_attention_variant": "dsa",
        "multi_latent_attention": True,
        "dsa_indexer_n_heads": 64,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": 2048,
        "qk_pos_emb_head_dim": 64,
        "apply_rope_fusion": False,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"dsa_indexer_n_heads": None}, "--dsa-indexer-n-heads"),
        ({"dsa_indexer_topk": None}, "--dsa-indexer-topk"),
        ({"multi_latent_attention": False}, "--multi-latent-attention"),
        ({"dsa_indexer_head_dim": 32}, "--dsa-indexer-head-dim 32"),
    ],
)
def test_what_cannot_be_built_is_told_before_anything_starts(changes, wanted):
    (problem,) = FEATURE.problems(arguments(**changes))
    assert wanted in problem


def test_fused_rope_is_switched_off_where_megatrons_dsa_has_none(monkeypatch):
    # Fused RoPE is Megatron's default, so no user has asked for it.
    monkeypatch.setattr("mindspeed_dsa.patches.versions.of_megatron", lambda root: "0.16.1")
    args = arguments(apply_rope_fusion=True)
    (said,) = FEATURE.rewrite(args)
    assert "--no-rope-fusion" in said
    assert args.apply_rope_fusion is False
    assert not FEATURE.rewrite(args)
    dense = arguments(apply_rope_fusion=True, experimental_attention_variant=None)
    assert not FEATURE.rewrite(dense)
    monkeypatch.setattr("mindspeed_dsa.patches.versions.of_megatron", lambda root: "0.19.0")
    assert not FEATURE.rewrite(arguments(apply_rope_fusion=True))


def test_all_problems_are_told_at_once():
    assert len(FEATURE.problems(arguments(dsa_indexer_n_heads=None, dsa_indexer_topk=None))) == 2


def test_what_can_be_built_is_not_complained_about():
    assert not FEATURE.problems(arguments())
    assert not FEATURE.problems(arguments(experimental_attention_variant=None, dsa_indexer_topk=None))
    assert not FEATURE.problems(SimpleNamespace(experimental_attention_variant="dsa"))
