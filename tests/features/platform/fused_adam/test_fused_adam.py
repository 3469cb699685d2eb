"""Fused Adam steps: the same training, and no trace in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_dsa.features.platform.without_apex import functions
from mindspeed_dsa.features.platform.without_apex.feature import FUSED_ADAM
from tests.support.optimizer_job import build, drawn_gradients, gather, step

# -- functions that run in the pool's workers ------------------------------------------------------


def train(switches: Mapping[str, Any] | None, loads: bool, **options: Any) -> dict[str, Any]:
    """Take three steps with given gradients; with ``loads``, save and load the state before the last one.

    Returns:
        weights, calls of the fused operator, and the param groups' flags between steps.
    """
    job = build(switches, **options)
    # One entry for all precisions and for both forms of weight decay.
    with mock.patch.object(torch, "_fused_adamw_", wraps=torch._fused_adamw_) as fused:
        for number in range(3):
            if number == 2 and loads:
                job.optimizer.load_state_dict(job.optimizer.state_dict())
            step(job, number, gradients=drawn_gradients)
    gather(job)
    groups = [group for part in job.parts for group in part.optimizer.param_groups]
    steps = [
        float(entry["step"])
        for part in job.parts
        for entry in part.optimizer.state.values()
        if "step" in entry
    ]
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in job.model.named_parameters()},
        "fused": fused.call_count,
        "said": [(group.get("fused"), group.get("foreach")) for group in groups],
        "steps": steps,
    }


CASES = "tests.features.platform.fused_adam.test_fused_adam"
LAYOUTS = [
    {},
    pytest.param({"precision": "fp32"}, marks=pytest.mark.full),
    {"distributed": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("loads", [False, pytest.param(True, marks=pytest.mark.full)])
def test_same_training(pool, layout, loads):
    (theirs,) = pool.run(f"{CASES}:train", 1, switches=None, loads=loads, **layout)
    (ours,) = pool.run(f"{CASES}:train", 1, switches={"fused_adam": True}, loads=loads, **layout)
    assert theirs["fused"] == 0
    assert ours["fused"] >= 3
    assert ours["said"] == theirs["said"], "between steps groups are as Megatron made them"
    assert ours["steps"] == theirs["steps"]
    assert set(ours["steps"]) == {3.0}
    for name, weight in theirs["weights"].items():
        # A bf16 weight may round to the neighbour if its master differs in the last bit.
        rtol = 1e-6 if weight.dtype == torch.float32 else 8e-3
        torch.testing.assert_close(ours["weights"][name], weight, rtol=rtol, atol=1e-6)


def test_when_it_is_on():
    def on(**given):
        return FUSED_ADAM.active(SimpleNamespace(**{"fused_adam": None, "platform": "npu", **given}))

    assert on()
    assert not on(platform="cpu")
    assert not on(platform="cuda")
    assert on(fused_adam=True, platform="cpu")
    assert not on(fused_adam=False)
    assert not on(swap_optimizer=True)
    assert not on(virtual_optimizer=["all"])
    assert not on(use_torch_fsdp2=True)


def test_a_loaded_number_of_steps_follows_its_parameter():
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(3.0)}
    with functions._fused(optimizer):
        assert optimizer.param_groups[0]["fused"] is True
        assert optimizer.state[parameter]["step"].device.type == "meta"
    assert optimizer.param_groups[0]["fused"] is None


def test_groups_are_as_they_were_when_a_step_fails():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], foreach=True)
    megatrons = SimpleNamespace(optimizer=optimizer)

    def unlucky(self):
        assert self.optimizer.param_groups[0]["fused"] is True
        raise ValueError("out of luck")

    with pytest.raises(ValueError, match="out of luck"):
        functions.step_in_one_operator(unlucky)(megatrons)
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (None, True)
    # Other optimizers step unchanged.
    assert (
        functions.step_in_one_operator(lambda self: "stepped")(SimpleNamespace(optimizer=object()))
        == "stepped"
    )


def test_an_npu_without_the_operators_steps_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # Checked once before the first step, which would otherwise end in torch's own error.
    monkeypatch.setattr(functions, "_absent", lambda: True)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    with functions._fused(optimizer):
        assert not optimizer.param_groups[0]["fused"]
