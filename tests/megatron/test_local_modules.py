"""The router's gating matmul without Transformer Engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mindspeed_dsa
from mindspeed_dsa import features, log
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.megatron.local_modules import gate_without_transformer_engine

CONTEXT = Context("any", None, Megatron(), log.get("any"))
MOE_UTILS = "megatron.core.transformer.moe.moe_utils"


def test_the_product_has_the_routers_type_and_gradients_the_inputs() -> None:
    moe_utils = pytest.importorskip(MOE_UTILS)
    transformer_engine = pytest.importorskip("megatron.core.extensions.transformer_engine")
    if transformer_engine.HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    gate = gate_without_transformer_engine(moe_utils.router_gating_linear, CONTEXT)
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
    transformer_engine = pytest.importorskip("megatron.core.extensions.transformer_engine")
    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    calls: list[Any] = []

    def router_gating_linear(*args: Any) -> str:
        calls.append(args)
        return "Megatron's"

    assert gate_without_transformer_engine(router_gating_linear, CONTEXT)(1, 2, 3) == "Megatron's"
    assert calls == [(1, 2, 3)]


def test_all_features_that_need_it_name_the_same_decorator() -> None:
    """The engine therefore applies it only once."""
    target = f"{MOE_UTILS}:router_gating_linear"
    rows = [(f.name, p.impl) for f in features.built_in() for p in f.patches if p.target == target]
    assert {name for name, _ in rows} == {"local-modules", "dsa-repairs"}
    assert len({impl for _, impl in rows}) == 1


def test_a_function_that_somebody_else_has_put_there_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moe_utils = pytest.importorskip(MOE_UTILS)

    def theirs(inp: Any, weight: Any, bias: Any, router_dtype: Any) -> Any:
        raise AssertionError("there is no Transformer Engine that could compute it")

    theirs.__module__ = "corp.ops"
    monkeypatch.setattr(moe_utils, "router_gating_linear", theirs)
    with mindspeed_dsa.enabled(mindspeed_platform="cpu", experimental_attention_variant="dsa"):
        gated = moe_utils.router_gating_linear(torch.ones(2, 4), torch.ones(3, 4), None, torch.float32)
        (site,) = [s for s in mindspeed_dsa.report() if s["target"] == f"{MOE_UTILS}:router_gating_linear"]
    assert gated.tolist() == [[4.0] * 3] * 2
    assert sorted(site["features"]) == ["dsa-repairs", "local-modules"]
    assert len(site["stack"]) == 1
    assert moe_utils.router_gating_linear is theirs
