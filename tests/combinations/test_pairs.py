"""The table of feature pairs: it covers every pair, and combined features train as without them."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path

import pytest

from mindspeed_dsa import features
from mindspeed_dsa.session.start_report import REPORT_FILE
from tests.combinations.pairs import NOT_PAIRED, PAGE, ROWS, Job, Table, flags_of, pairs, shortened
from tests.combinations.play import deviation, train

TABLE = Table.kept()


def test_every_feature_that_one_switches_on_has_a_row():
    row_flags = {flag for row in ROWS for flag in flags_of(row)}
    lacking = {
        feature.name
        for feature in features.all_features()
        if any(not flag.megatron for flag in feature.flags)
        and not feature.name.startswith(("dsa-", "mtp-"))
        and not any({flag.name, f"--no-{flag.name[2:]}"} & row_flags for flag in feature.flags)
    }
    assert lacking == NOT_PAIRED.keys()


def test_no_pair_is_unaccounted_for():
    together = {frozenset(pair) for job in TABLE.jobs for pair in itertools.combinations(job.rows, 2)}
    refused = {frozenset(pair) for pair in TABLE.refused}
    assert not together & refused
    assert {frozenset(pair) for pair in pairs()} == together | refused


def test_what_is_refused_says_the_reason_on_the_page_and_what_to_do():
    said = {pair: Job(pair).refusal() for pair in TABLE.refused}
    assert {pair: shortened(why) if why else None for pair, why in said.items()} == TABLE.refused
    assert PAGE.read_text(encoding="utf-8") == TABLE.page()
    silent = [why for why in said.values() if not re.search(r"\b(omit|drop|use|add|choose)\b", why or "")]
    assert silent == []


def test_no_job_is_refused():
    assert {job.rows: why for job in TABLE.jobs if (why := job.refusal())} == {}


@pytest.fixture(scope="module")
def jobs_without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return records of jobs without features, and their first weights, by the jobs' flags."""
    return {"folder": tmp_path_factory.mktemp("plain")}


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", range(1, len(TABLE.jobs) + 1))
def test_features_train_together_as_without(number: int, tmp_path: Path, jobs_without: dict[str, object]):
    job = TABLE.jobs[number - 1]
    ranks, layout = job.layout
    folder = jobs_without["folder"]
    assert isinstance(folder, Path)
    start, plain = (f"start {' '.join(job.model)}", f"plain {layout} {' '.join(job.model)}")
    if start not in jobs_without:
        weights = folder / f"start{len(jobs_without)}"
        train([*job.model, "--train-iters", "0"], 1, weights, ["--save", str(weights / "checkpoints")])
        jobs_without[start] = weights / "checkpoints"
    load = ["--load", str(jobs_without[start]), "--finetune", "--no-save"]
    if plain not in jobs_without:
        jobs_without[plain] = train(job.plain, ranks, folder / f"plain{len(jobs_without)}", load)
    own = [word.replace("FOLDER", str(tmp_path)) for word in job.argv()]
    featured = train(own, ranks, tmp_path / "job", load)
    without = jobs_without[plain]
    assert isinstance(without, list)
    assert deviation(without, featured, job.dtype) <= 1, json.dumps([job.rows, without, featured])
    sites = json.loads((tmp_path / "job" / REPORT_FILE).read_text())["sites"]
    applied = {name for site in sites if site["state"] == "applied" for name in site["features"]}
    assert {each.name for each in job.features() if each.patches} <= applied
    for file in ("profile.json", "schedule.json", "expert_load.jsonl"):
        if any(f"FOLDER/{file}" in row for row in job.rows):
            assert os.path.getsize(tmp_path / file)
