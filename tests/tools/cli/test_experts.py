"""``experts`` says what unequal loads cost, and how much of it each remedy removes."""

from __future__ import annotations

import json
import random

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.runs import expert_load, metrics
from mindspeed_dsa.runs.expert_load import LayerLoad
from mindspeed_dsa.tools.cli import experts_levers
from tests.tools.planner.recorded_loads import EVEN, ONE, by_rank, hot, write

PAIR = [400, 400] + [0] * 6
"""Two hot experts that are neighbours: another place for one of them removes half of the imbalance."""


def removed(folder) -> dict[str, str]:
    rows = experts_levers.lines(experts_levers.rows_of(expert_load.read(folder)))
    return {name: share for name, _, share in rows}


def test_even_loads_cost_nothing(tmp_path):
    folder = write(tmp_path, dict.fromkeys(range(1, 9), EVEN))
    rows = removed(folder)
    assert rows["today"] == "0% of the rows are waits"
    assert {rows[name] for name in ("placement", "moving", "layout")} == {"0%"}


def test_neighbours_are_placed_apart(tmp_path):
    # One of eight layers, two per stage: 800 + 200 rows today, 400 + 200 placed, 8 x 200 / 4 if even.
    folder = write(tmp_path, {layer: PAIR if layer == 5 else EVEN for layer in range(1, 9)})
    layers = experts_levers.rows_of(expert_load.read(folder))
    assert (layers[4].today, layers[4].placed, layers[4].even) == (800, 400, 200)
    assert removed(folder)["placement"] == "67%"


def test_one_hot_expert_is_moved_if_rows_outweigh_its_weights(tmp_path):
    few, many = (tmp_path / name for name in ("few", "many"))
    thousandfold = {layer: [10**6 * n for n in (ONE if layer == 5 else EVEN)] for layer in range(1, 9)}
    assert removed(hot(few, 8))["moving"] == "0%"
    assert removed(write(many, thousandfold))["moving"] == "100%"
    # A microbatch has fewer rows, and its weights travel as far.
    assert removed(write(tmp_path / "micro", thousandfold, microbatches=10**6))["moving"] == "0%"


def test_layers_are_dealt_anew(tmp_path):
    # 12 layers, 3 per stage: 200 + 800 + 200 today, 800 with the hot layer alone, 12 x 200 / 4 if even.
    rows = removed(hot(tmp_path))
    assert rows["layout"] == "67%"


@pytest.mark.parametrize(
    ("stages", "shape"),
    [
        ([0, 0, 1, 1], (2, 1, False)),
        ([0, 1, 0, 1], (2, 2, False)),
        ([0, 1, 1, 0], (2, 2, True)),
        ([1, 2, 2, 1, 0], (3, 2, True)),
        ([0, 0], (1, 1, False)),
    ],
    ids=["plain", "interleaved", "V", "V with a dense first stage", "no pipeline"],
)
def test_the_pipeline_is_read_from_the_stages(stages, shape):
    split = experts_levers.split_of([experts_levers.LayerRows(stage, 4, 2, 2, 2) for stage in stages])
    assert (split.ranks, split.chunks, split.v_shaped) == shape


def test_records_without_microbatches_leave_moving_open(tmp_path, capsys):
    file = hot(tmp_path) / expert_load.FILE
    record = json.loads(file.read_text())
    for layer in record["layers"]:
        del layer["microbatches"]
    file.write_text(json.dumps(record) + "\n")
    assert main(["experts", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "the records have no microbatches; record again" in said
    assert "50% of the rows are waits" in said


def test_moving_follows_experts_that_are_hot_in_turn(tmp_path):
    """Over all steps the loads are even, and in each of them one expert has all tokens."""
    records = []
    for step in range(1, 9):
        experts = [0] * 8
        experts[step % 8] = 8 * 10**8
        loads = [LayerLoad(layer, (layer - 1) // 2, experts, [by_rank(experts)]) for layer in range(1, 5)]
        records.append(expert_load.record(step, loads))
    rows = {name: share for name, _, share in experts_levers.lines(experts_levers.rows_of(records))}
    assert (rows["placement"], rows["moving"]) == ("0%", "100%")


def test_no_remedy_has_more_rows_than_today():
    """The best stages of two chunks can be worse than today's for their ranks."""
    noise = random.Random(1)
    for _ in range(40):
        layers = [
            experts_levers.LayerRows(stage, today, 1, today, noise.random() * today)
            for stage in (0, 0, 0, 1, 0, 1, 1)
            for today in [noise.choice([1.0, 4.0, 9 * noise.random()])]
        ]
        rows = {name: float(rows.replace(",", "")) for name, rows, _ in experts_levers.lines(layers)[1:]}
        assert rows["layout"] <= rows["today"]
        assert rows["layout with the better of these"] <= rows["moving"]


def test_records_without_layers_are_refused(tmp_path, capsys):
    metrics.append(tmp_path / expert_load.FILE, expert_load.record(1, []))
    assert main(["experts", str(tmp_path)]) == 2
    assert "step 1 has no layers with experts" in capsys.readouterr().err
