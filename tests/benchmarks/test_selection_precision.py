"""The benchmark of selections, on tiny problems, reports every metric and counts shares correctly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support import third_party, warm

third_party.or_skip("megatron.core")

from benchmarks import selections, shared_layers  # noqa: E402


def test_shares_of_the_same_keys():
    one = torch.tensor([[0, 2, 4, -1], [1, 2, 3, 4], [0, -1, -1, -1]], dtype=torch.int32)
    other = torch.tensor([[0, 1, 4, -1], [4, 3, 2, 1], [3, -1, -1, -1]], dtype=torch.int32)
    assert shared_layers.same_keys(one, other, 5).tolist() == pytest.approx([2 / 3, 1.0, 0.0])


def test_a_part_that_there_is_not_is_named():
    with pytest.raises(SystemExit, match="--only speed is none of fp8, agreement"):
        selections.run("cpu", only="speed")


def test_every_ratio_is_measured():
    found = selections.run("cpu", quick=True, only="fp8")
    json.dumps(found)
    for of_model in found["fp8_over_bf16"].values():
        for times in of_model.values():
            assert times.keys() == {"bf16_ms", "fp8", "fp8-plain", "fp8 with the loss's scores"}
            assert min(times.values()) > 0


def test_a_recording_is_counted_and_read_again():
    found = selections.run("cpu", quick=True, only="recording")
    assert found.keys() == {"bytes_over_int32", "recording_step_ratio", "step_s", "reading_a_layer_s"}
    assert 0 < found["bytes_over_int32"] < 0.35


@pytest.mark.full
def test_keys_of_a_trained_model_are_compared():
    command = [sys.executable, "-m", "benchmarks", "selections", "--quick", "--only", "agreement"]
    done = warm.run(command, cwd=Path(__file__).parents[2], timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])["metrics"]["same_keys"]
    for when in ("untrained", "trained"):
        for of_layers in found[when].values():
            assert of_layers.keys() == {"all", "layer 1", "layer 2", "layer 3"}
            assert all(0.9 < share < 1 for share in of_layers.values())
