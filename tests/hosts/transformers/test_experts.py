"""Experts of transformers' models on our operators, as on NPUs, equal transformers' own products.

The tests use CPU tensors; ``_DEVICES`` of the module lists the devices that are served.
"""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.integrations.transformers import NAME, apply_dsa, experts
from tests.hosts.transformers.models import INPUTS, KINDS, build, close
from tests.hosts.transformers.test_parity import step

EXPERTS = 8
"""Number of experts of a layer in the models."""


@pytest.fixture
def calls(monkeypatch):
    """Serve CPU tensors; yield the number of rows of each product."""
    monkeypatch.setattr(experts, "_DEVICES", ("cpu",))
    widths = []
    multiply = experts.grouped_matmul
    monkeypatch.setattr(
        experts, "grouped_matmul", lambda rows, *a, **k: widths.append(len(rows)) or multiply(rows, *a, **k)
    )
    return widths


@pytest.mark.parametrize("name", [name for name in KINDS if " " not in name])
def test_logits_are_transformers_own(calls, name):
    model = build(name)
    config = model.config.get_text_config()
    assert config._experts_implementation == "grouped_mm"
    logits, _ = step(model, INPUTS["causal"])
    assert calls == []
    in_use = apply_dsa(model)
    assert config._experts_implementation == NAME
    ours, _ = step(model, INPUTS["causal"])
    rows = INPUTS["causal"]["input_ids"].numel() * 2
    assert calls == [rows] * 4  # up and down in two layers; the first one is dense
    assert close(ours, logits)
    in_use.undo()
    assert config._experts_implementation == "grouped_mm"
    again, _ = step(model, INPUTS["causal"])
    assert torch.equal(again, logits)
    assert len(calls) == 4


@pytest.mark.parametrize("name", [name for name in KINDS if " " not in name])
def test_gradients_are_those_of_transformers_loop_over_experts(calls, name):
    # In fp64, for which grouped_mm has no product: gradients of factors sum rows that nearly cancel, so that
    # in fp32 more than the bound depends on the processor.
    model = build(name).double()
    in_use = apply_dsa(model)
    _, of_ours = step(model, INPUTS["causal"])
    of_ours = {key: gradient.clone() for key, gradient in of_ours.items()}
    assert len(calls) == 4
    in_use.undo()
    model.config.get_text_config()._experts_implementation = "eager"
    _, gradients = step(model, INPUTS["causal"])
    assert len(calls) == 4
    assert of_ours.keys() == gradients.keys()
    assert [key for key in gradients if not close(of_ours[key], gradients[key])] == []


def test_what_was_asked_for_and_other_devices_stay(calls, monkeypatch):
    model = build("deepseek_v32", experts_implementation="batched_mm")
    in_use = apply_dsa(model)
    assert model.config._experts_implementation == "batched_mm"
    in_use.undo()
    monkeypatch.setattr(experts, "_DEVICES", ("npu",))
    model = build("deepseek_v32")
    apply_dsa(model)
    assert model.config._experts_implementation == "grouped_mm"
    step(model, INPUTS["few keys"])
    assert calls == []


def test_a_model_that_is_moved_later_looks_at_each_call(calls, monkeypatch):
    with torch.device("meta"):
        model = build("deepseek_v32")
    apply_dsa(model)
    assert model.config._experts_implementation == NAME
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.01)
    monkeypatch.setattr(experts, "_DEVICES", ("npu",))
    model(**INPUTS["few keys"])
    assert calls == []
    monkeypatch.setattr(experts, "_DEVICES", ("cpu",))
    model(**INPUTS["few keys"])
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_other_ranks_add_nothing(calls, dtype):
    """A token may have several experts of other ranks, or only such; rows of local experts stay the same."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    layer = build("deepseek_v32").model.layers[1].mlp.experts.to(dtype)
    layer._is_expert_parallel = True
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randn(20, 32, generator=generator).to(dtype).requires_grad_()
    ids = torch.rand(20, EXPERTS, generator=generator).topk(3).indices
    ids[:6, 1:] = EXPERTS
    ids[6] = EXPERTS
    weights = torch.rand(20, 3, generator=generator).masked_fill(ids == EXPERTS, 0).requires_grad_()
    both = []
    for run in (grouped_mm_experts_forward, experts.run_experts):
        out = run(layer, tokens, ids, weights)
        leaves = (tokens, weights, layer.gate_up_proj, layer.down_proj)
        both.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert calls == [int((ids < EXPERTS).sum())] * 2
    theirs, ours = both
    assert theirs[0].dtype == ours[0].dtype == dtype
    assert not ours[0][6].any()
    for mine, other in zip(ours, theirs, strict=True):
        assert close(mine, other, 1e-5 if dtype == torch.float32 else 2e-2)
