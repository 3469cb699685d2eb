"""Optimizers that load another stage's state, with stand-ins for those that need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_dsa.features.dsa.stages import layers
from mindspeed_dsa.features.dsa.stages.checkpoint import load_across_stages, load_state
from mindspeed_dsa.patches import SettingsError


class FusedAdam:
    """Stand-in for Transformer Engine's FusedAdam in the precision-aware optimizer, which keeps master
    weights.

    The first step without state for a parameter makes it.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": [parameter], "step": 7, "stage_of_dsa": "warmup"}
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                state = self.state.setdefault(parameter, {})
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                    state["master_param"] = parameter.detach().clone().float()
                state["master_param"] -= parameter.grad
                parameter.data.copy_(state["master_param"])


class Distributed:
    """Stand-in for Megatron's distributed optimizer, which allocates state to load into, but no master
    weights.
    """

    def __init__(self, inner: FusedAdam | None) -> None:
        self.optimizer = inner
        self.is_stub_optimizer = inner is None

    def allocate(self) -> None:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                names = ("exp_avg", "exp_avg_sq", "master_param")
                # Megatron uses torch.empty, so the values are arbitrary.
                self.optimizer.state[parameter] = {name: torch.full_like(parameter, 9.0) for name in names}

    def reload_model_params(self) -> None:
        """Do nothing."""


def context(stage: str) -> tuple[Any, list[str]]:
    """Return a fake session context, and the list of its log lines."""
    said: list[str] = []
    log = SimpleNamespace(info=lambda text, *args, **kwargs: said.append(text % args))
    return SimpleNamespace(options=SimpleNamespace(stage=stage), log=log), said


def loading(stage: str) -> tuple[Callable[..., Any], list[Any], list[str]]:
    """Return ``load_state_dict`` in a stage, the states passed to Megatron's own, and log lines."""
    passed_on: list[Any] = []
    here, said = context(stage)
    return load_state(lambda self, state: passed_on.append(state), here), passed_on, said


def test_master_weights_that_the_optimizer_keeps_are_made_from_the_loaded_weights() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    part = Distributed(inner := FusedAdam(parameter))
    part.allocate()
    parameter.data.fill_(5.0)  # the model's weights are loaded
    load, own, said = loading("sparse")
    load(part, {"optimizer": {"param_groups": [{"stage_of_dsa": "warmup"}]}})
    assert not own
    assert len(said) == 1
    parameter.grad = torch.ones(2)
    inner.step()
    assert parameter.tolist() == [4.0, 4.0]
    assert inner.param_groups[0]["step"] == 1
    assert not inner.state[parameter]["exp_avg"].any()


def test_master_weights_of_parts_that_are_offloaded_stay_where_they_are() -> None:
    # Megatron copies the weights into these masters, and the optimizer state refers to the same tensors.
    parameter, master = torch.nn.Parameter(torch.full((2,), 5.0)), torch.full((2,), 9.0)
    inner = FusedAdam(parameter)
    inner.sub_optimizers = []  # type: ignore[attr-defined]
    inner.state[parameter] = {"exp_avg": torch.ones(2), "master_param": master}
    part = Distributed(inner)
    part.reload_model_params = lambda: master.copy_(parameter.detach())  # type: ignore[method-assign]
    load, _, _ = loading("sparse")
    load(part, {"optimizer": {"param_groups": [{"stage_of_dsa": "warmup"}]}})
    assert inner.state[parameter]["master_param"] is master
    assert master.tolist() == [5.0, 5.0]
    assert not inner.state[parameter]["exp_avg"].any()


OF_0_2 = {"param_groups": [{"lr": 1.0}]}


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
@pytest.mark.parametrize(
    "state",
    [
        {"optimizer": OF_0_2, "dsa_stage": {"trained": ["indexers"]}},
        {**OF_0_2, "dsa_stage": {"lag": 2.0}},
        [{"optimizer": OF_0_2}, {"optimizer": OF_0_2, "dsa_stage": {"places": [[1]], "lag": 2.0}}],
        {0: {"optimizer": OF_0_2, "dsa_stage": {"trained": ["all else"]}}, 1: {"optimizer": OF_0_2}},
    ],
    ids=["bf16", "fp32", "chain of format torch", "chain"],
)
def test_an_optimizers_state_of_0_2_that_says_what_it_trained_is_refused(stage: str, state: Any) -> None:
    # Otherwise the default stage would load the moments into other parameters.
    load, passed_on, _ = loading(stage)
    with pytest.raises(SettingsError, match=r"mindspeed_dsa 0\.2\.0 .*; load it with --no-load-optim$"):
        load(Distributed(FusedAdam(torch.nn.Parameter(torch.ones(2)))), state)
    assert not passed_on


def test_an_optimizers_state_of_0_2_that_trained_all_from_the_start_is_loaded() -> None:
    load, passed_on, said = loading("sparse")
    state = {"optimizer": OF_0_2, "dsa_stage": {"places": [[1]]}}
    load(Distributed(FusedAdam(torch.nn.Parameter(torch.ones(2)))), state)
    assert passed_on == [state]
    assert not said


def test_weights_of_a_checkpoint_of_0_2_are_loaded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # With ``--no-load-optim``, Megatron requests no optimizer state.
    monkeypatch.setattr(layers, "checked", lambda wanted, *args: wanted)
    common = {"optimizer": {"optimizer": OF_0_2, "dsa_stage": {"trained": ["indexers"]}}}
    files = SimpleNamespace(
        load_sharded_metadata=lambda folder: {
            "decoder.layers.0.self_attention.core_attention.indexer.linear_wk.weight": None
        },
        load_common_state_dict=lambda folder: common,
    )
    here, _ = context("sparse")
    here.state = lambda kind: SimpleNamespace(config=object())
    here.megatron = lambda module: files
    load = load_across_stages(lambda wanted, *args: dict.fromkeys(wanted, "loaded"), here)
    assert load({"model": "x"}, "there") == {"model": "loaded"}
    with pytest.raises(SettingsError, match="load it with --no-load-optim"):
        load({"model": "x", "optimizer": {}}, "there")


@pytest.mark.parametrize("state", [{}, {"stage_of_dsa": "sparse"}])
def test_an_optimizer_without_parameters_begins_nothing_anew(state: dict[str, str]) -> None:
    # A rank whose layers train nothing in this stage has Megatron's stub optimizer with empty state.
    load, passed_on, said = loading("warmup")
    load(Distributed(None), state)
    assert not said
    assert not passed_on
