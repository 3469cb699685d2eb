"""Moments in preallocated places, without Megatron."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.optimizers.moments import MOMENTS, Moments
from mindspeed_dsa.patches.errors import SettingsError


def test_moments_without_a_count_of_steps_are_refused_and_nothing_is_loaded():
    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([weight])
    moments = Moments(adam, {weight: (torch.zeros(3), torch.zeros(3))})
    moments.begin_all()
    saved = adam.state_dict()
    saved["state"] = {0: {key: torch.full((3,), 2.0) for key in MOMENTS}}
    with moments.loading("load the weights alone"), pytest.raises(SettingsError, match="no count of steps"):
        adam.load_state_dict(saved)
    assert not adam.state[weight]["exp_avg"].any()
    saved["state"][0]["step"] = torch.tensor(5.0)
    with moments.loading("load the weights alone"):
        adam.load_state_dict(saved)
    assert adam.state[weight]["step"] == 5
    assert adam.state[weight]["exp_avg"].eq(2).all()
