"""The benchmark of layers that share: recall by its definition, memory by its formula, a whole tiny run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support import third_party, warm

third_party.or_skip("megatron.core")

from benchmarks import shared_layers  # noqa: E402
from mindspeed_dsa.features.dsa import core_attention  # noqa: E402
from mindspeed_dsa.features.dsa.operands import Operands  # noqa: E402
from mindspeed_dsa.features.dsa.problem import IndexInputs, Problem  # noqa: E402

ROWS, HEADS, TOPK, SCALE = 24, 3, 5, 0.4


def test_shares_are_those_of_a_loop_over_query_tokens():
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (ROWS, 2, HEADS, 12),
        (ROWS, 2, 1, 12),
        (HEADS, 6, 8),
        (2, ROWS, 4, 8),
        (2, ROWS, 8),
        (2, ROWS, 4),
    )
    query, key, value, *index = (torch.randn(*shape, generator=generator) for shape in shapes)
    problem = Problem(Operands(query, key, value, SCALE), TOPK, backend="reference")
    with shared_layers.watched_attention(1) as shares:
        result = core_attention.sparse_attention(problem, IndexInputs(*index))
    recalls, masses = [], []
    for sequence in range(2):
        for row in range(TOPK, ROWS):
            logits = torch.einsum("hd,kd->hk", query[row, sequence], key[: row + 1, sequence, 0]) * SCALE
            attention = logits.softmax(-1).mean(0)
            selected = result.topk_indices[0][sequence, row].long()
            recalls.append(len({*attention.topk(TOPK).indices.tolist()} & {*selected.tolist()}) / TOPK)
            masses.append(float(attention[selected].sum()))
    (found,) = shares
    assert found["recall"] == pytest.approx(sum(recalls) / len(recalls))
    assert found["attention"] == pytest.approx(sum(masses) / len(masses))
    assert torch.equal(found["keys"].int(), result.topk_indices[0])


def measured(part: str) -> dict:
    command = [sys.executable, "-m", "benchmarks", "selections", "--quick", "--only", part]
    done = warm.run(command, cwd=Path(__file__).parents[2], timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["metrics"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_served_keeps_the_bytes_of_the_formula():
    found = measured("served")
    assert found["served_time"].keys() == {
        "own_step_ms",
        "share_of_loss",
        "served_over_own",
        "bound",
        "holds",
    }
    for form in found["served_memory"].values():
        assert form["error"] <= 0.02


@pytest.mark.full
@pytest.mark.timeout(600)
def test_all_patterns_are_trained_and_the_search_is_the_plain_one():
    found = measured("layers")
    models = found["shared_layers"]
    assert len(models) == 5
    for name, model in models.items():
        assert 0 < model["recall"]["mean"] < 1
        assert 0 < model["attention"]["mean"] < 1
        assert model["patterns"].count("S") == (0 if name == "indexer in each layer" else 6)
    full = models["indexer in each layer"]
    assert full["equal_keys"]["mean"] == 1
    assert full["above_full"]["mean"] == 0
    (search,) = found["searches"].values()
    assert search["same_choices_as_plain"] == "yes"
    assert search["largest_difference_of_losses"] == 0
