"""Megatron's local modules without Transformer Engine and Apex, nothing switched on, on any release."""

from __future__ import annotations

import pytest

from tests.matrix.dense_cases import LAYER_NORM, RMS_NORM
from tests.support.model import assert_same_gradients, put_together

CASES = "tests.matrix.dense_cases"


@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=["LayerNorm", "RMSNorm"])
def test_a_dense_model_trains_with_sequence_parallelism(pool, norm):
    (alone,) = pool.run(f"{CASES}:step", 1, norm=norm)
    ranks = pool.run(f"{CASES}:step", 2, tp=2, norm=norm)
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert_same_gradients(put_together(ranks), alone["gradients"])
    weights = put_together([{**rank, "gradients": rank["weights"]} for rank in ranks])
    for name, weight in alone["weights"].items():
        assert (weights[name] - weight).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("get_gpt_layer_with_transformer_engine_spec", {}),
        ("get_gpt_decoder_block_spec", {"use_transformer_engine": True}),
    ],
)
def test_a_model_that_needs_transformer_engine_says_so(pool, function, arguments):
    (error,) = pool.run(
        "tests.support.model:error_of",
        1,
        case=f"{CASES}:transformer_engine",
        name=function,
        **arguments,
    )
    assert error == (
        "SettingsError: local-modules: --transformer-impl transformer_engine (Megatron's default) needs "
        "Transformer Engine, which is not installed; add --transformer-impl local"
    )
