"""Digests of the weights before the first step."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
import torch

import mindspeed_dsa
from mindspeed_dsa.features.diagnostics.steps.weights import digest
from mindspeed_dsa.tools.compare import result


class Wrapped(torch.nn.Module):
    """Wrapper that prefixes parameter names as DDP does."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


@pytest.fixture
def train(megatron, tmp_path):
    def run(name, model):
        mindspeed_dsa.enable(initial_weights_dir=str(tmp_path / name))
        import_module(f"{megatron}.training.training").train(2, model)
        return tmp_path / name

    return run


def test_the_weights_before_the_first_step_are_written_once(train):
    trained = model()
    before = {name: digest(p) for name, p in trained.named_parameters()}
    folder = train("w", Wrapped(Wrapped(trained)))
    with torch.no_grad():
        trained.weight += 1.0
    train("w", Wrapped(trained))
    content = json.loads((folder / "weights-rank00000.json").read_text())
    assert content == {"rank": 0, "world_size": 1, "parameters": before}
    assert before["weight"]["shape"] == [2, 3]


def test_chunks_of_an_interleaved_pipeline_keep_apart(train):
    names = result.weights_of_run(train("w", [model(0), model(1)]))
    assert set(names) == {f"rank 0: chunk{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}


def test_compare_tells_equal_from_different_weights(train):
    same = {
        "A1": result.weights_of_run(train("a", model())),
        "B1": result.weights_of_run(train("b", [model()])),
    }
    assert result.compare_weights(same)["same"] is True
    other = model()
    with torch.no_grad():
        other.bias[1] = torch.nextafter(other.bias[1], torch.tensor(9.0))  # one bit of one weight
    difference = result.compare_weights({**same, "A2": result.weights_of_run(train("c", other))})
    assert difference["same"] is False
    assert "1 of 2 weights differ between A1 and A2" in difference["how"]
    assert "rank 0: bias" in difference["how"]


def test_other_types_and_silence_are_not_taken_for_agreement(train):
    first = result.weights_of_run(train("a", model()))
    half = result.weights_of_run(train("b", model().bfloat16()))
    assert result.compare_weights({"A1": first, "B1": half})["same"] is None
    loaded = result.compare_weights({"A1": first, "B1": half}, {"folder": "initial", "unchanged": True})
    assert loaded["same"] is True
    assert "all runs loaded initial" in loaded["how"]
    silent = result.compare_weights({"A1": first, "B1": {}})
    assert silent["same"] is None
    assert "B1 wrote no digests" in silent["how"]


def test_every_type_of_weight_has_a_digest():
    values = torch.arange(4.0)
    digests = {digest(values.to(dtype))["sha256"] for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    assert len(digests) == 3
    assert digest(values.reshape(2, 2).T) != digest(values.reshape(2, 2))
    assert digest(torch.tensor(1.0))["shape"] == []
