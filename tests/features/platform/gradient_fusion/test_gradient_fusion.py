"""Gradient accumulation fusion without Apex: the same gradients as without fusion."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import mindspeed_dsa
from mindspeed_dsa import platforms
from mindspeed_dsa.features.platform.without_apex import feature
from mindspeed_dsa.features.platform.without_apex.feature import GRADIENT_FUSION, switch_off_missing_fusions
from mindspeed_dsa.features.platform.without_apex.functions import Kernels
from tests.features.memory.recompute_cases import EXPERTS, PLAIN, built
from tests.support import model as job

# -- functions that run in the pool's workers ------------------------------------------------------


def step(
    switches: Mapping[str, Any],
    overrides: Mapping[str, Any],
    fusion: bool,
    dtype: str = "float32",
    overlap: bool = False,
    **layout: Any,
) -> dict[str, Any]:
    """Return the gradients of two microbatches, and the number of gradients that linear layers added.

    Args:
        switches: feature switches.
        overrides: config fields that differ from the model's.
        fusion: value of Megatron's ``gradient_accumulation_fusion``.
        dtype: dtype of the weights.
        overlap: whether gradients are reduced during backward.
        **layout: parallel sizes.
    """
    job.start(switches, **layout)
    kind = getattr(torch, dtype)
    precision = {"params_dtype": kind, "bf16": kind == torch.bfloat16}
    cfg, chunks = built({**overrides, **precision, "gradient_accumulation_fusion": fusion}, **layout)
    chunks = [chunk.to(kind) for chunk in chunks]
    original, added = Kernels.wgrad_gemm_accum_fp32, []

    def watched(rows: Any, grad_output: Any, main_grad: Any) -> None:
        assert (rows.dtype, main_grad.dtype) == (kind, torch.float32)
        added.append(tuple(main_grad.shape))
        original(rows, grad_output, main_grad)

    with mock.patch.object(Kernels, "wgrad_gemm_accum_fp32", staticmethod(watched)):
        job.train_step(cfg, chunks, list(job.samples(4).split(2)), ddp={"overlap_grad_reduce": overlap})
    return {"gradients": job.gradients(chunks), "added": added}


CASES = "tests.features.platform.gradient_fusion.test_gradient_fusion"
SWITCH = "gemm_gradient_accumulation_fusion"
DSA = {"use_fused_dsa": True}
OVERLAP = {"moe_alltoall_overlap_comm": True}
SWAP = {"swap_attention": True, "swap_attention_min_bytes": 0}


@pytest.mark.parametrize(
    ("overrides", "switches", "layout"),
    [
        pytest.param(PLAIN, {}, {"tp": 1}, marks=pytest.mark.full),
        pytest.param(PLAIN, {"use_ascend_coc": True, **SWAP}, {"tp": 2}, marks=pytest.mark.full),
        pytest.param(
            EXPERTS, {"moe_alltoall_overlap_comm": True}, {"tp": 1, "ep": 2}, marks=pytest.mark.full
        ),
        ({}, DSA, {"tp": 1}),
    ],
    ids=("GPT", "overlapped and swapped, TP2", "experts, EP2", "DSA"),
)
def test_same_gradients(pool, overrides, switches, layout):
    ranks = layout["tp"] * layout.get("ep", 1)
    asked = {"overrides": overrides, "overlap": True, **layout}
    off = pool.run(f"{CASES}:step", ranks, switches=switches, fusion=False, **asked)
    on = pool.run(f"{CASES}:step", ranks, switches={**switches, SWITCH: True}, fusion=True, **asked)
    for before, after in zip(off, on, strict=True):
        assert not before["added"]
        # Two microbatches, each with two layers of two attention and two MLP linears, and the output layer.
        assert len(after["added"]) >= 2 * (2 * 4 + 1)
        assert before["gradients"].keys() == after["gradients"].keys()
        for name, gradient in before["gradients"].items():
            torch.testing.assert_close(after["gradients"][name], gradient, rtol=1e-5, atol=1e-7, msg=name)
        assert all(gradient.any() for name, gradient in off[0]["gradients"].items() if "linear_fc" in name)


def test_16_bit_products_are_rounded_as_without_fusion(pool):
    asked = {"overrides": PLAIN, "dtype": "bfloat16", "tp": 1}
    (off,) = pool.run(f"{CASES}:step", 1, switches={}, fusion=False, **asked)
    (on,) = pool.run(f"{CASES}:step", 1, switches={SWITCH: True}, fusion=True, **asked)
    assert on["added"]
    for name, gradient in off["gradients"].items():
        assert torch.equal(on["gradients"][name], gradient), name


def test_main_grad_in_16_bits():
    rows, grad_output = torch.randn(6, 3).bfloat16(), torch.randn(6, 4).bfloat16()
    main_grad = torch.ones(4, 3).bfloat16()
    Kernels.wgrad_gemm_accum_fp16(rows, grad_output, main_grad)
    expected = 1 + grad_output.double().t() @ rows.double()
    torch.testing.assert_close(main_grad.double(), expected, rtol=8e-3, atol=8e-3)


def test_an_expert_without_tokens():
    main_grad = torch.ones(4, 3)
    Kernels.wgrad_gemm_accum_fp32(torch.empty(0, 3).bfloat16(), torch.empty(0, 4).bfloat16(), main_grad)
    assert torch.equal(main_grad, torch.ones(4, 3))


def test_when_it_is_on(monkeypatch):
    def on(**given):
        return GRADIENT_FUSION.active(SimpleNamespace(**{SWITCH: None, "platform": "npu", **given}))

    assert on()
    assert not on(platform="cpu")
    assert not on(platform="cuda")
    assert not on(use_torch_fsdp2=True)
    assert on(**{SWITCH: True}, platform="cpu")
    assert not on(**{SWITCH: False})
    monkeypatch.setattr(feature, "find_spec", lambda name: name == feature.EXTENSION)
    assert not on(**{SWITCH: True}), "Apex is taken where it is installed"


@pytest.mark.parametrize("platform", ["npu", "cpu"])
def test_mindspeed_command_lines_keep_it_where_it_is_served(monkeypatch, platform):
    monkeypatch.setattr(platforms, "current", lambda: platforms.get(platform))
    args = argparse.Namespace(gradient_accumulation_fusion=True, gemm_gradient_accumulation_fusion=None)
    assert bool(switch_off_missing_fusions(args)) == (platform == "cpu")
    assert args.gradient_accumulation_fusion == (platform == "npu")


def test_a_deferred_embedding_is_refused():
    args = argparse.Namespace(gradient_accumulation_fusion=True, defer_embedding_wgrad_compute=True)
    with (
        mindspeed_dsa.enabled(mindspeed_platform="cpu", **{SWITCH: True}),
        pytest.raises(mindspeed_dsa.SettingsError, match="gradient-accumulation-fusion: --defer-embedding"),
    ):
        mindspeed_dsa.validate(args)
