"""Recorded loads give each layer an imbalance of its own; records of another model are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs import expert_load, metrics
from mindspeed_dsa.runs.expert_load import LayerLoad
from mindspeed_dsa.tools.planner import arguments, communication, memory, plan, timing
from mindspeed_dsa.tools.planner.devices import device
from mindspeed_dsa.tools.planner.job import Job
from tests.tools.planner.recorded_loads import EVEN, JOB, LAYERS, MODEL, ONE, hot, write


def job(folder: Path | None, more: str = "", imbalance: float | None = None) -> Job:
    return arguments.job_of(f"{JOB} {more}".split(), 16, imbalance=imbalance, expert_load=folder)


def skews(planned: Job) -> list[float]:
    return [kind.skew for kind in planned.kinds]


def test_records_come_before_a_given_imbalance_and_that_before_the_usual_one(tmp_path):
    assert skews(job(None)) == [1.05] * LAYERS
    assert skews(job(None, imbalance=1.3)) == [1.3] * LAYERS
    assert skews(job(hot(tmp_path), imbalance=1.3)) == [1.0] * 4 + [4.0] + [1.0] * 7


def test_dense_layers_and_single_expert_ranks_have_none(tmp_path):
    layers = dict.fromkeys(range(2, LAYERS + 1), ONE)
    dense = job(write(tmp_path, layers), "--moe-layer-freq [0]+[1]*11")
    assert skews(dense) == [1.0] + [4.0] * 11
    alone = arguments.job_of(MODEL.split(), 1, expert_load=hot(tmp_path / "hot"))
    assert skews(alone) == [1.0] * LAYERS


def test_prediction_layers_follow_the_decoders(tmp_path):
    layers = {layer: ONE if layer > LAYERS else EVEN for layer in range(1, LAYERS + 2)}
    predicting = job(write(tmp_path, layers), "--mtp-num-layers 1")
    assert [kind.skew for kind in predicting.mtp_kinds] == [4.0]
    assert skews(predicting) == [1.0] * LAYERS


def test_recorded_ranks_count_if_there_are_as_many(tmp_path):
    """Placed experts were on other ranks than their numbers say, and replicas differ."""
    ranks = [[50, 150, 100, 100], [100, 100, 100, 100]]
    load = LayerLoad(1, 0, [100] * 8, ranks)
    records = [expert_load.record(1, [load])]
    assert expert_load.rank_imbalances(records, 4) == {1: 1.5}
    assert expert_load.rank_imbalances(records, 2) == {1: 1.0}
    # Ranks wait in each step: (8 + 4) over (4 + 4).
    steps = [expert_load.record(step, [LayerLoad(1, 0, x, [x])]) for step, x in ((1, [8, 0]), (2, [4, 4]))]
    assert expert_load.rank_imbalances(steps, 2) == {1: 1.5}


def test_only_the_hot_layers_work_grows(tmp_path):
    even, uneven = job(None, imbalance=1.0), job(hot(tmp_path))
    times = [
        [timing.compute(each, device("h100"), rank, 0)[0]["routed experts"] for rank in range(4)]
        for each in (even, uneven)
    ]
    ratios = [b / a for a, b in zip(*times, strict=True)]
    assert ratios[0] == ratios[2] == ratios[3] == 1.0
    # One of three layers has four times the rows, on weights that are read as before.
    assert 1.2 < ratios[1] < 2.0
    sent = [
        sum(x.nbytes for x in communication.of_job(each)[1] if x.group == "EP") for each in (even, uneven)
    ]
    assert sent[1] == pytest.approx(2 * sent[0])
    kept = [memory.of_job(each, 0.05)[1].activations["routed experts"] for each in (even, uneven)]
    assert 1.5 < kept[1] / kept[0] < 2.1


def test_the_report_names_the_worst_layer(tmp_path, capsys):
    words = ["plan", "--devices", "16", "--expert-load", str(hot(tmp_path)), "--json", str(tmp_path / "json")]
    assert main([*words, "--", *JOB.split()]) == 0
    assert "over the mean: 1.00 to 4.00 as recorded, the most in layer 5" in capsys.readouterr().out
    imbalance = json.loads((tmp_path / "json").read_text())["constants"]["imbalance"]
    assert (imbalance["source"], imbalance["by_layer"][4]) == ("recorded loads", 4.0)


@pytest.mark.parametrize(
    ("layers", "more", "said"),
    [
        ({1: [9] * 16}, "", "layers of 16 experts, the job's have 8"),
        (dict.fromkeys(range(1, 11), EVEN), "", "in layers 1-10, and the job has them in layers 1-12"),
        (dict.fromkeys(range(2, 13), EVEN), "", "in layers 2-12, and the job has them in layers 1-12"),
        (dict.fromkeys(range(1, 14), EVEN), "", "layers 1-13, and the job has them in layers 1-12 of 12"),
        (dict.fromkeys(range(1, 13), EVEN), "--mtp-num-layers 1", "in layers 1-13 of 12 and 1 to predict"),
    ],
    ids=["experts", "fewer layers", "dense layer", "more layers", "prediction"],
)  # fmt: skip
def test_records_of_another_model_are_refused(tmp_path, layers, more, said):
    with pytest.raises(
        SettingsError, match=f"--expert-load {tmp_path}.*{said}.*give the records of this model"
    ):
        job(write(tmp_path, layers), more)


def test_torn_records_are_refused(tmp_path):
    file = hot(tmp_path) / expert_load.FILE
    whole = file.read_text()
    file.write_text(whole[:100] + "\n" + whole)
    with pytest.raises(
        SettingsError, match="1 of its last lines are no records of steps; remove these lines"
    ):
        job(tmp_path)
    # The ranks' tokens of a layer are not its experts'.
    record = json.loads(whole)
    record["layers"][3]["ranks"][0][0] += 1
    file.unlink()
    metrics.append(file, record)
    with pytest.raises(SettingsError, match="layer 4 has 800 tokens by expert and 801 by rank"):
        job(tmp_path)
    with pytest.raises(SettingsError, match="name the folder that was given to that flag"):
        job(tmp_path / "nowhere")


def test_what_if_reads_the_records_for_its_own_layout(tmp_path):
    words = f"{MODEL} --expert-model-parallel-size 2 --pipeline-model-parallel-size 4".split()
    other = arguments.job_of(words, 8, expert_load=hot(tmp_path))
    assert other.kinds[4].skew == 2.0
    assert plan.make(other, device("h100")).time.total > 0
