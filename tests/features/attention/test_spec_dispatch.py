from __future__ import annotations

import torch

CASES = "tests.features.attention.cases"
ERROR = "tests.features.attention.job:error_of"


def test_every_layer_gets_the_sparse_core_attention(pool):
    (names,) = pool.run(f"{CASES}:core_attentions", 1, switches={})
    assert names == ["DSAttention", "DSAttention"]


def test_without_the_repair_megatron_refuses(pool):
    (error,) = pool.run(ERROR, 1, case=f"{CASES}:core_attentions", switches={"dsa_spec_dispatch": False})
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
