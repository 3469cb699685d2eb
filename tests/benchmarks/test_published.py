"""Plans of published runs: their tables on the page, and figures of groups of runs."""

from __future__ import annotations

import json
import math
import shlex

import pytest

from benchmarks.__main__ import main
from benchmarks.plan import published
from mindspeed_dsa.tools.cli import plan as command

OUTSIDE = {"untuned", "deterministic", "one microbatch", "unfused activations"}
KINDS = {"", "allocated", "reserved", "whole device"}


@pytest.fixture(scope="module")
def records():
    return published.records()


@pytest.fixture(scope="module")
def runs(records):
    return published.planned(records)


def by_name(found, name):
    return next(item for item in found if item["id"] == name)


def test_the_page_has_the_tables_of_the_records(records):
    text = published.PAGE.read_text(encoding="utf-8")
    wanted = published.filled(text, published.tables(records))
    assert wanted == text, "run python -m benchmarks plan --published"


def test_records_are_whole(records):
    fields = set(json.loads(published.RECORDS.read_text(encoding="utf-8"))["fields"])
    assert len({record["id"] for record in records}) == len(records)
    for record in records:
        assert set(record) == fields, record["id"]
        assert record["source"]["repo"]
        assert record["source"]["path"]
        assert record["quality"] in "ABC"
        assert bool(record["plan"]) == (record["quality"] != "C")
        assert set(record["outside"]) <= OUTSIDE
        assert record["published_memory_kind"] in KINDS
        assert bool(record["published_memory_kind"]) == (record["published_memory_gib"] is not None)
        assert bool(record["quality_why"]) == (record["quality"] == "B"), record["id"]
        assert bool(record["why_not_plannable"]) == (record["quality"] == "C"), record["id"]


def test_plans_have_the_layouts_that_records_state(runs):
    for run in runs:
        layout, record = run.plan.job.layout, run.record
        stated = record["layout"]
        assert layout.devices == record["devices"], record["id"]
        found = {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "ep", "cp", "dp")}
        assert found == {name: stated[name] for name in found}, record["id"]
        training, rounds = run.plan.job.training, record["plan"]["rounds"]
        assert training.sequence == record["sequence"], record["id"]
        assert training.batch * rounds == record["global_batch"], record["id"]


def test_times_agree_with_published_rates(runs):
    for run in runs:
        record = run.record
        tokens = record["global_batch"] * record["sequence"] / record["devices"]
        rate = tokens / run.published
        if record["id"] != "am-dsv3-1024":  # the source prints 865 and 37.87 s, 1 / 1.002 of each other
            assert record["published"]["tokens_s_device"] == pytest.approx(rate, rel=2e-3), record["id"]


def test_facts_become_flags(records):
    flags = published.flags_of(by_name(records, "br-q30-overlap"))
    assert "--moe-router-force-load-balancing" in flags
    assert flags[flags.index("--moe-flex-dispatcher-backend") + 1] == "hybridep"
    assert flags[flags.index("--cuda-graph-modules") + 1 :][:2] == ["moe_router", "moe_preprocess"]
    assert flags.count("--overlap-moe-expert-parallel-comm") == 1
    assert "--moe-router-force-load-balancing" not in published.flags_of(by_name(records, "br-q30-natural"))
    assert "--tp-comm-overlap" in published.flags_of(by_name(records, "mlm-32b"))
    assert "--exp-avg-dtype" in published.flags_of(by_name(records, "br-dsv3-1024"))


def test_the_command_plans_the_same(records, runs, tmp_path):
    words = shlex.split(published.command(by_name(records, "br-dsv3-gb200")))
    assert words[:4] == ["python", "-m", "mindspeed_dsa", "plan"]
    file = tmp_path / "plan.json"
    command.run(["--json", str(file), *words[4:]])
    seconds = json.loads(file.read_text())["step"]["seconds"]
    (run,) = (each for each in runs if each.record["id"] == "br-dsv3-gb200")
    assert seconds == pytest.approx(run.planned)


def test_plans_are_near_published_times(runs):
    """Goals of the planner; they may become stricter."""
    figures = published.nearness(published.of_quality(runs, "A"))
    assert figures.near >= 15
    assert figures.typical <= 1.14


def test_no_job_that_ran_is_planned_as_too_large(runs):
    assert [run.record["id"] for run in runs if not run.fits] == []


class Timed:
    """Run with a given ratio of planned to published time."""

    def __init__(self, ratio, quality="A"):
        self.ratio, self.record, self.outside = ratio, {"quality": quality}, []
        self.near = 0.8 <= ratio <= 1.25


def test_figures_of_a_group():
    figures = published.nearness([Timed(0.5), Timed(1.0), Timed(2.0), Timed(1.25)])
    assert (figures.runs, figures.near) == (4, 2)
    assert figures.typical == pytest.approx(math.exp((2 * math.log(2) + math.log(1.25)) / 4))
    assert figures.median == pytest.approx(1.125)


def test_halves_have_every_second_run():
    found = published.groups([Timed(1), Timed(9, "B"), Timed(2), Timed(3), Timed(4), Timed(5)])
    ratios = {title: [run.ratio for run in own] for title, own in found.items()}
    assert ratios["quality A, first half"] == [1, 3, 5]
    assert ratios["quality A, second half"] == [2, 4]
    assert ratios["quality B"] == [9]


def test_another_file_is_printed_and_not_written(records, tmp_path, capfd):
    before = published.PAGE.read_text(encoding="utf-8")
    slow = json.loads(json.dumps(by_name(records, "ms-llama2-7b-a2")))
    slow |= {"id": "slow", "published": {"step_s": 60.0}, "outside": ["untuned"]}
    file = tmp_path / "more.json"
    file.write_text(json.dumps({"runs": [slow]}))
    assert main(["plan", "--published", str(file)]) == 0
    shown, said = capfd.readouterr()
    assert "| `slow` A | LLaMA2-7B |" in said
    assert "| untuned | `slow` |" in said
    assert json.loads(shown.splitlines()[-1])["metrics"]["quality A"]["runs"] == 1
    assert published.PAGE.read_text(encoding="utf-8") == before
