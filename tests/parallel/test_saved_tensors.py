from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.parallel import saved_tensors


@pytest.fixture
def weight() -> torch.nn.Parameter:
    """Return a square parameter in the second half of its storage."""
    parameter = torch.nn.Parameter(torch.randn(8, 4)[4:])
    saved_tensors.remember_parameter(parameter)
    return parameter


def test_a_look_alike_is_the_parameter(weight):
    assert saved_tensors.parameter_of(weight.detach()) is weight


@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight.t(),
        lambda weight: weight.view(2, 8),
        torch.from_dlpack,  # a storage that begins there
    ],
    ids=("strides", "shape", "offset"),
)
def test_other_views_at_its_address_are_not(weight, view):
    other = view(weight.detach())
    assert other.data_ptr() == weight.data_ptr()
    assert saved_tensors.parameter_of(other) is other
