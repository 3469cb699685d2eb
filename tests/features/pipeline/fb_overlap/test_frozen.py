"""With a part of the model frozen, the rest trains as in stock's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from tests.features.pipeline.fb_overlap import paired_steps
from tests.support import model
from tests.support.model import assert_same_gradients, losses_of

# -- functions that run in the pool's workers ------------------------------------------------------


def trained(frozen: Sequence[str], **arguments: Any) -> dict[str, Any]:
    """Run ``paired_steps.trained`` with all weights frozen whose names contain one of these parts."""
    build, former_gradients = model.gpt_model, model.gradients

    def gpt_model(*given: Any, **more: Any) -> Any:
        built = build(*given, **more)
        for name, parameter in built.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        return built

    def gradients(chunks: Any, only: str = "") -> dict[str, Any]:
        learning = {
            name
            for chunk in chunks
            for name, parameter in model.global_names(chunk).items()
            if parameter.requires_grad
        }
        with mock.patch.object(model, "global_names", lambda chunk: _part(chunk, learning)):
            return former_gradients(chunks, only)

    names = model.global_names

    def _part(chunk: Any, learning: set[str]) -> dict[str, Any]:
        return {name: each for name, each in names(chunk).items() if name in learning}

    with mock.patch.object(model, "gpt_model", gpt_model), mock.patch.object(model, "gradients", gradients):
        return paired_steps.trained(**arguments)


FROZEN = {
    "embedding": ["embedding"],
    "all before the experts": ["embedding", "layers.0", "self_attention", "norm", "router", "shared_experts"],
}


FROZEN_LAYERS = {**FROZEN, "experts": ["local_experts"], "a layer's all but the norms": ["self_att", "mlp"]}
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def step(pool, frozen, switches, **overrides):
    return pool.run(
        "tests.features.pipeline.fb_overlap.test_frozen:trained",
        2,
        frozen=frozen,
        switches=switches,
        overrides=overrides,
        num_microbatches=2,
        micro_batch_size=1,
        ep=2,
        etp=1,
    )


@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param(parts, id=name, marks=pytest.mark.full if name == "embedding" else ())
        for name, parts in FROZEN.items()
    ],
)
def test_losses_and_gradients(pool, frozen):
    off, on = (step(pool, frozen, switches) for switches in ({}, {"moe_fb_overlap": True}))
    for before, after in zip(off, on, strict=True):
        assert losses_of(after) == pytest.approx(losses_of(before), rel=1e-6)
        assert any("local_experts" in name for name in after["gradients"])
        assert not any(part in name for name in after["gradients"] for part in frozen)
        assert_same_gradients(after["gradients"], before["gradients"], rtol=1e-5)
    assert any("launch" in rank["events"] for rank in on)


@pytest.mark.full
@pytest.mark.parametrize("recomputed", [AGAIN, EXPERTS], ids=["layers", "experts"])
@pytest.mark.parametrize("frozen", FROZEN_LAYERS.values(), ids=list(FROZEN_LAYERS))
def test_recomputed(pool, frozen, recomputed):
    """Recomputation is bit-identical to pairs that keep all activations."""
    kept, ours = (step(pool, frozen, {"moe_fb_overlap": True}, **what) for what in ({}, recomputed))
    for before, after in zip(kept, ours, strict=True):
        assert after["losses"] == before["losses"]
        assert after["gradients"].keys() == before["gradients"].keys() != set()
        assert all(torch.equal(each, before["gradients"][name]) for name, each in after["gradients"].items())
