"""``--use-flash-attn`` without Transformer Engine runs the operator instead of Megatron's unfused scores."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa import log
from mindspeed_dsa.features.attention.context_parallel.core_attention import (
    attend_with_other_ranks,
    build_for_the_operator,
    plan_of,
)
from mindspeed_dsa.features.attention.context_parallel.feature import (
    check_flash_attention,
    flash_wanted,
)
from tests.support import model as job
from tests.support.contexts import context

CASES = "tests.features.attention.context_parallel.dense_model"
ON = {"use_flash_attn": True}
LAYERS, MICROBATCHES = 2, 2


def check(pool, **layout):
    tp = layout.get("tp", 1)
    expected = pool.run(f"{CASES}:step", tp, attention="grouped", **layout)
    actual = pool.run(f"{CASES}:step", tp, attention="grouped", more=ON, **layout)
    assert [rank["calls"] for rank in expected] == [0] * tp
    # Recomputation calls the operator's forward a second time. Backward calls are not counted.
    passes = 2 if "overrides" in layout else 1
    assert [rank["calls"] for rank in actual] == [passes * LAYERS * MICROBATCHES] * tp
    torch.testing.assert_close(actual[0]["losses"], expected[0]["losses"], rtol=1e-6, atol=0)
    gradients = [job.put_together(ranks) for ranks in (actual, expected)]
    job.assert_same_gradients(*gradients, rtol=1e-5)
    assert any(not torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_same_step_as_megatrons_attention(pool):
    check(pool)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": False},
        {"overrides": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}},
        {"more_overrides": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}},
    ],
    ids=str,
)
def test_same_step_in_other_layouts(pool, layout):
    if "more_overrides" in layout:
        overrides = layout["more_overrides"]
        expected = pool.run(f"{CASES}:step", 1, attention="grouped", overrides=overrides)
        found = pool.run(f"{CASES}:step", 1, attention="grouped", more=ON, overrides=overrides)
        assert found[0]["calls"] == LAYERS * MICROBATCHES
        job.assert_same_gradients(found[0]["gradients"], expected[0]["gradients"], rtol=1e-5)
    else:
        check(pool, **layout)


def test_when_it_is_on():
    local = {**ON, "transformer_impl": "local"}
    assert flash_wanted(SimpleNamespace(**local))
    assert not flash_wanted(SimpleNamespace(transformer_impl="local"))
    assert not flash_wanted(SimpleNamespace(**ON, transformer_impl="transformer_engine"))
    assert not flash_wanted(SimpleNamespace(**ON))
    # Other features already use the operator here, or attend sparsely.
    assert not flash_wanted(SimpleNamespace(**local, context_parallel_size=2))
    assert not flash_wanted(SimpleNamespace(**local, multi_latent_attention=True))
    assert not flash_wanted(SimpleNamespace(**local, experimental_attention_variant="dsa"))


def test_refused_before_training():
    fine = SimpleNamespace(attention_dropout=0.0, reset_attention_mask=False)
    assert not list(check_flash_attention(fine, None))
    (dropout, reset) = check_flash_attention(
        SimpleNamespace(attention_dropout=0.1, reset_attention_mask=True), None
    )
    assert dropout.startswith("--attention-dropout: ")
    assert "use --attention-dropout 0" in dropout
    assert reset.startswith("--reset-attention-mask: ")


def attention_of(mask_type="causal", kind="self", dropout=0.0):
    def megatrons(self, config, layer_number, attn_mask_type, attention_type):
        self.attn_mask_type = attn_mask_type
        self.attention_dropout = SimpleNamespace(p=dropout)
        # Layer 4: Megatron divides the scale by the layer number.
        self.scale_mask_softmax, self.softmax_scale = SimpleNamespace(scale=4), 0.125

    attention = SimpleNamespace()
    built = build_for_the_operator(megatrons, context("flash-attention"))
    built(attention, None, 4, SimpleNamespace(name=mask_type), kind)
    return attention


def test_other_kinds_of_attention_stay_megatrons(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger(log.NAME), "propagate", True)
    log.forget()
    assert plan_of(attention_of()).inner.softmax_scale == 0.5
    assert not caplog.records
    for other in ({"mask_type": "padding"}, {"kind": "cross"}, {"dropout": 0.1}):
        assert plan_of(attention_of(**other)) is None
    assert "keeps Megatron's attention" in caplog.text


def test_a_mask_that_comes_with_a_batch_is_refused_by_name():
    states = torch.randn(4, 1, 2, 8)
    forward = attend_with_other_ranks(lambda *given: "Megatron's own", context("flash-attention"))
    attention = attention_of()
    assert forward(attention, states, states, states, None).shape == (4, 1, 16)
    with pytest.raises(ValueError, match="flash-attention: an attention mask came with a batch"):
        forward(attention, states, states, states, states)
