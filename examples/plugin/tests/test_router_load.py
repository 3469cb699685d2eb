"""Tests on Megatron's own router: log lines, and a result equal to stock's."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from dsa_router_load.router import describe

import mindspeed_dsa

EXPERTS, HIDDEN = 4, 8


@pytest.fixture
def lines():
    """Lines that the feature logs."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("mindspeed_dsa.router-load")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def make_router():
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
    )
    torch.manual_seed(0)
    nobody = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(tp=nobody, cp=nobody, tp_cp=nobody, tp_dp_cp=nobody)
    router = TopKRouter(config, groups)
    router.set_layer_number(3)
    return router


def test_the_log_and_the_result(lines):
    tokens = torch.randn(6, 1, HIDDEN)
    with mindspeed_dsa.enabled():  # on a machine without a GPU Megatron runs on the CPU, and that is all
        stock = make_router()(tokens)
    with mindspeed_dsa.enabled(log_router_load=True, router_load_interval=2):
        router = make_router()
        with torch.no_grad():
            router(tokens)
        first = router(tokens)
        assert lines == []
        second = router(tokens)
    assert lines == [f"layer 3, call 2: {describe(stock[1])}"]
    for logged in (first, second):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(logged, stock, strict=True))


def test_what_is_counted():
    routing_map = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]], dtype=torch.bool)
    assert describe(routing_map) == ("the busiest of 4 experts got 2.40 times the mean load, 1 got nothing")
    assert "0.00 times" in describe(torch.zeros(0, 4, dtype=torch.bool))


def test_bad_arguments_are_refused_before_the_job_starts():
    with (
        mindspeed_dsa.enabled(log_router_load=True, router_load_interval=0),
        pytest.raises(mindspeed_dsa.SettingsError) as refused,
    ):
        mindspeed_dsa.validate(SimpleNamespace(num_experts=None))
    assert "add --num-experts" in str(refused.value)
    assert "--router-load-interval 0: use at least 1" in str(refused.value)
    assert "router-load (plug-in mindspeed-dsa-router-load" in str(refused.value)
