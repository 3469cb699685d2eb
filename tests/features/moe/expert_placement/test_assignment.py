"""Orders of experts from loads, and the placement file."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.runs import expert_load, expert_placement
from mindspeed_dsa.runs.expert_load import LayerLoad, imbalance
from mindspeed_dsa.runs.expert_placement import Placement, balanced, rank_loads
from mindspeed_dsa.runs.files import RunError


def zipf(experts, exponent):
    return [round(1e6 / (1 + expert) ** exponent) for expert in range(experts)]


def best(loads, ranks):
    """Return the smallest possible maximum load, by brute force."""
    return min(max(rank_loads(loads, order, ranks)) for order in itertools.permutations(range(len(loads))))


@pytest.mark.parametrize(("experts", "ranks"), [(64, 4), (64, 8), (256, 8)])
def test_hot_neighbours_are_spread(experts, ranks):
    """Hot experts spread so far that only the hottest expert's rank limits the balance."""
    # That rank also holds other experts, at best the coldest ones.
    loads = zipf(experts, 1.0)
    order = balanced(loads, ranks)
    assert sorted(order) == list(range(experts))
    least = loads[0] + sum(loads[1 - experts // ranks :])
    assert max(rank_loads(loads, order, ranks)) <= 1.01 * max(least, sum(loads) / ranks)
    assert imbalance(rank_loads(loads, list(range(experts)), ranks)) > 2


def test_small_layers_are_placed_nearly_as_well_as_can_be():
    chance = random.Random(0)
    for _ in range(8):
        loads = [chance.randrange(1, 1000) for _ in range(6)]
        assert max(rank_loads(loads, balanced(loads, 3), 3)) <= 1.1 * best(loads, 3)


def test_the_same_loads_give_the_same_order_and_balanced_experts_stay():
    assert balanced([5] * 8, 4) == list(range(8))
    assert balanced([0] * 8, 4) == list(range(8))
    assert balanced([9, 1, 1, 9], 2) == [0, 1, 2, 3]
    assert balanced([9, 9, 1, 1], 2) == balanced([9, 9, 1, 1], 2) != [0, 1, 2, 3]


def test_a_file_is_what_was_written(tmp_path):
    placement = Placement(4, 2, {2: [0, 3, 1, 2], 5: [0, 1, 2, 3]})
    expert_placement.write(tmp_path / "p.json", placement)
    assert expert_placement.read(tmp_path / "p.json") == placement


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        '{"num_experts": 2, "expert_model_parallel_size": 2, "layers": {}}',
        '{"num_experts": 2, "expert_model_parallel_size": 2, "layers": {"1": [1, 1]}}',
    ],
)
def test_other_files_are_no_placements(tmp_path, content):
    file = tmp_path / "p.json"
    file.write_text(content)
    with pytest.raises(RunError, match=r"is not a placement of experts .*write one with: python -m"):
        expert_placement.read(file)


def test_a_missing_file_is_called_missing(tmp_path):
    with pytest.raises(RunError, match=r"^there is no file .*p.json; write one with: python -m"):
        expert_placement.read(tmp_path / "p.json")
    with pytest.raises(RunError, match="cannot be read"):
        expert_placement.read(tmp_path)


def test_the_command_makes_a_placement_of_a_report(tmp_path, capsys):
    loads = [LayerLoad(2, 0, [6, 6, 1, 1], [[12, 2]]), LayerLoad(3, 0, [1, 1, 1, 1], [[2, 2]])]
    (tmp_path / expert_load.FILE).write_text(json.dumps(expert_load.record(1, loads)) + "\n")
    file = tmp_path / "placement.json"
    flags = ["--placement", str(file), "--expert-model-parallel-size"]
    assert main(["experts", str(tmp_path), *flags, "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split() == ["2", "1.714", "1.000"]
    placement = expert_placement.read(file)
    assert (placement.experts, placement.ranks) == (4, 2)
    assert placement.orders == {2: [0, 2, 1, 3], 3: [0, 1, 2, 3]}
    for size in ("3", "0", "-2"):
        assert main(["experts", str(tmp_path), *flags, size]) == 2
        said = capsys.readouterr().err
        assert f"4 experts cannot be spread evenly over --expert-model-parallel-size {size}" in said
