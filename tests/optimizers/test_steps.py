"""Steps of torch's Adam with moments on the host, without Megatron and TorchTitan."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.optimizers.integrity import StepIntegrity
from mindspeed_dsa.optimizers.moments import Moments
from mindspeed_dsa.optimizers.step_pipeline import Parameter, Pipeline, Slab

SIZES = (1003, 77, 2050)
"""No size is a multiple of a vector's length."""


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in SIZES]


@pytest.mark.parametrize("kind", ["fused", "foreach", "for-loop"])
def test_parts_round_as_whole_parameters(kind):
    """A fused step on a CPU rounds the elements behind the last whole vector in another way."""
    options = {"lr": 0.1, "fused": kind == "fused", "foreach": kind == "foreach"}
    whole, parts = weights(), weights()
    stock, swapped = torch.optim.AdamW(whole, **options), torch.optim.AdamW(parts, **options)
    slab = Slab([Parameter(weight, 0, None) for weight in parts])
    moments = Moments(swapped, {each.main: slab.of(each) for each in slab.parameters})
    pipeline = Pipeline(swapped, [slab], moments, 7, StepIntegrity("test"))
    assert len(pipeline.chunks) > len(SIZES), "some parameter is cut"
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        for one, other in zip(whole, parts, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        stock.step()
        pipeline.step(swapped.step)
    pipeline.settle()
    for one, other in zip(whole, parts, strict=True):
        assert one.equal(other)
        for name, value in stock.state[one].items():
            assert value.equal(swapped.state[other][name]), name
