"""The router's gating matmul without Transformer Engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_dsa import features
from mindspeed_dsa.integration.router import gate_without_transformer_engine

MOE_UTILS = "megatron.core.transformer.moe.moe_utils"


def test_the_product_has_the_routers_type_and_gradients_the_inputs() -> None:
    moe_utils = pytest.importorskip(MOE_UTILS)
    transformer_engine = pytest.importorskip("megatron.core.extensions.transformer_engine")
    if transformer_engine.HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    gate = gate_without_transformer_engine(moe_utils.router_gating_linear)
    inp = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(3)
    for product, expected in (
        (gate(inp, weight, torch.float32), inp.float() @ weight.float().T),
        (gate(inp, weight, bias, torch.float32), inp.float() @ weight.float().T + bias),
        (gate(inp, weight, bias=None, router_dtype=torch.float32), inp.float() @ weight.float().T),
    ):
        assert product.dtype is torch.float32
        torch.testing.assert_close(product, expected)
    product.sum().backward()
    assert inp.grad is not None
    assert inp.grad.dtype is torch.bfloat16


def test_with_transformer_engine_it_is_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    moe_utils = pytest.importorskip(MOE_UTILS)
    transformer_engine = pytest.importorskip("megatron.core.extensions.transformer_engine")
    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    calls: list[Any] = []

    def router_gating_linear(*args: Any) -> str:
        calls.append(args)
        return "Megatron's"

    router_gating_linear.__module__ = moe_utils.__name__
    assert gate_without_transformer_engine(router_gating_linear)(1, 2, 3) == "Megatron's"
    assert calls == [(1, 2, 3)]


def test_all_features_that_need_it_name_the_same_decorator() -> None:
    """So that the engine applies it once."""
    target = f"{MOE_UTILS}:router_gating_linear"
    rows = [(f.name, p.impl) for f in features.built_in() for p in f.patches if p.target == target]
    assert {name for name, _ in rows} == {"cpu-platform", "dsa-local-provider"}
    assert len({impl for _, impl in rows}) == 1
