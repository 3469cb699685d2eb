"""Every option of Megatron-LM has a verdict, refusals are those of the page, and jobs train as without."""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dsa import session
from mindspeed_dsa.tools.migrate import megatron_flags
from tests.combinations.draw import MODEL
from tests.combinations.megatron_lm import Jobs
from tests.combinations.option_rows import JOB, OPTIONS, OUTSIDE, SERVED, SETS
from tests.combinations.options import (
    FEATURES,
    JOBS,
    PAGE,
    Base,
    Table,
    asked,
    deviation_of,
    outside,
    row_of,
    rows,
)
from tests.combinations.play import deviation
from tests.support import example_job
from tests.support.example_job import RankOutcome
from tests.support.pool import WorkerPool

MENDED = [
    ("--recompute-norm", "--fine-grained-activation-offloading", "copying to the host"),
    ("--recompute-activation-function", "--fine-grained-activation-offloading", "copying to the host"),
    ("--two-streams", "--fine-grained-activation-offloading", "one stream"),
    ("--recompute-in-advance --recompute-activations", "--fine-grained-activation-offloading", "order"),
    ("--recompute-in-advance --recompute-activations", "--use-megatron-fsdp", "dropped their weights"),
    ("--moe-batch-overlap --no-deterministic-mode", "--fine-grained-activation-offloading", "in their order"),
    ("--moe-batch-overlap --no-deterministic-mode", "--moe-paged-stash", "in their order"),
    ("--moe-batch-overlap --no-deterministic-mode", "--use-megatron-fsdp", "under the transfers"),
    ("--moe-alltoall-overlap-comm", "--use-megatron-fsdp", "under the transfers"),
    ("--use-ascend-coc --coc-parallel-num 2", "--use-megatron-fsdp", "chunks"),
    ("--mla-sp-tp-sp", "--use-megatron-fsdp", "whole weights"),
    ("--mla-sp-tp-sp", "--optimizer muon", "muon-tp-mode"),
    ("--moe-tp-extend-ep", "--optimizer muon", "muon-tp-mode"),
    ("--moe-fb-overlap", "--hybrid-override-pattern M*M*", "model of its own"),
    ("--schedules-method dualpipev", "--hybrid-override-pattern M*M*", "dealt out"),
    ("--pack-documents", "--hybrid-override-pattern M*M*", "GPT models alone"),
    ("--dsa-stage warmup", "--hybrid-override-pattern M*M*", "GPT models alone"),
    ("--dsa-record-selections {0}", "--hybrid-override-pattern M*M*", "pass no batch"),
    ("--pack-documents --bf16", "--window-size 16,0", "packed documents"),
    ("--pack-documents --bf16", "--softmax-type learnable", "packed documents"),
    ("--use-dsa-absorb on", "--qk-clip", "keeps none"),
    ("--use-dsa-absorb on", "--log-max-attention-logit", "keeps none"),
]
"""Feature, option, and words of its refusal."""
ACCEPTED = [
    ("--mla-sp-tp-sp", "--optimizer muon --muon-tp-mode duplicated"),
    ("--moe-tp-extend-ep", "--optimizer muon --muon-tp-mode duplicated"),
    ("--pack-documents", "--softmax-type vanilla"),
    ("--moe-expert-placement auto", "--moe-token-dispatcher-type flex"),
    ("--two-streams", "--moe-token-dispatcher-type flex"),
]
"""Feature and option that are used together."""


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Keep the messages about rewritten arguments out of the report."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_recorded_flag_has_a_verdict():
    lacking = [flag for flag in megatron_flags.record() if row_of(flag) is None and outside(flag) is None]
    assert lacking == [], "add them to a row of AREAS, or to OUTSIDE (tests/combinations/option_rows.py)"


def test_every_pattern_names_a_flag():
    patterns = {each for _, row in rows() for each in row.flags.split()}
    patterns |= {each for listed in OUTSIDE.values() for each in listed.split()}
    flags = megatron_flags.record()
    assert [each for each in patterns if not any(fnmatchcase(flag, each) for flag in flags)] == []


def test_the_page_is_generated():
    assert PAGE.read_text(encoding="utf-8") == Table.kept().page()


def test_served_options_name_what_trains_them():
    root = PAGE.parents[2]
    for _, row in rows():
        if row.verdict != SERVED or row.note in OPTIONS:
            continue
        named = re.findall(r"`(.+?)`|\((.+?)\)", row.note)
        assert named or row.note == JOB, row.note
        assert all((root / test).exists() if test else (PAGE.parent / page).exists() for test, page in named)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_refusals_are_the_features_own():
    assert tuple(asked()) == Table.kept().refused


@pytest.mark.parametrize(("feature", "option", "words"), MENDED)
def test_an_option_that_would_break_a_feature_is_refused(feature: str, option: str, words: str):
    base = Base.of(feature, FEATURES[feature])
    assert base.problems() == []
    release = "0.16.1" if all(_has(flag) for flag in option.split()[:1]) else "0.19.0"
    before, after = base.problems(release=release), base.problems(option.split(), release)
    new = [each for each in after if each not in before]
    assert len(new) == 1
    assert words in new[0]


def _has(flag: str) -> bool:
    return "0.16.1" in megatron_flags.record()[flag]


@pytest.mark.parametrize(("feature", "option"), ACCEPTED)
def test_an_option_that_a_feature_does_not_touch_is_accepted(feature: str, option: str):
    assert Base.of(feature, FEATURES[feature]).problems(option.split()) == []


def test_no_job_is_refused():
    assert {job: said for job in JOBS if (said := job.base.problems(job.features.split()))} == {}


def test_options_are_beside_features_in_each_place_or_refused():
    places = {job.at for job in JOBS}
    lacking = {
        (at, key)
        for at in places
        for options in SETS
        for key in options
        if not any(job.at == at and key in job.options for job in JOBS)
    }
    assert lacking == {("CP", "windows"), ("DP", "buckets")}
    ulysses, shards = Base.of(JOBS[-4].features, "dense CP"), Base.of("--use-torch-fsdp2", "DP")
    assert "--window-size" in ulysses.problems(["--window-size", "16,0"])[0]
    assert "use_distributed_optimizer" in shards.problems(["--use-distributed-optimizer"])[0]


ROUTER = (
    "--moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias --moe-z-loss-coeff 0.001 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --adam-beta2 0.9 --clip-grad 0.5"
).split()


def trained(argv: Sequence[str], switches: Mapping[str, Any]) -> tuple[RankOutcome, set[str]]:
    """Train with a command line; return the outcome and the names of active features."""
    session.enable_from_argv(argv)
    outcome = example_job.train(argv, switches=switches)
    running = session.current()
    assert running is not None
    return outcome, {feature.name for feature in running.features}


def test_options_train_beside_features_as_without(pool: WorkerPool, tmp_path: Path):
    """The quick one of the jobs below, with the example's own loop."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "input.py").write_text(inspect.getsource(argparse))
    data = ["--data", str(tmp_path / "text"), "--data-cache-path", str(tmp_path / "cache")]
    argv = [*MODEL, *ROUTER, *data, "--train-iters", "2", "--no-save"]
    features = ("recompute-norm", "swap-optimizer", "moe-grouped-gemm")
    train = f"{__name__}:trained"
    ((without, plain),) = pool.run(train, 1, argv=argv, switches={})
    ((featured, active),) = pool.run(
        train, 1, argv=[*argv, *(f"--{each}" for each in features)], switches={"use_fused_dsa": True}
    )
    assert active >= {*features, "fused-dsa"}
    assert not plain & {*features, "fused-dsa"}
    assert len(without.records) == 2
    assert deviation(without.records, featured.records, "fp32") <= 1


@pytest.fixture(scope="module")
def checkout() -> Iterator[Jobs]:
    """Return the process that runs jobs of ``MEGATRON_LM``."""
    jobs = Jobs(os.environ["MEGATRON_LM"].split(os.pathsep)[0])
    yield jobs
    jobs.close()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize("number", range(1, len(JOBS) + 1))
def test_megatron_lm_trains_with_options_beside_features_as_without(
    number: int, tmp_path: Path, checkout: Jobs
):
    assert deviation_of(JOBS[number - 1], checkout, tmp_path) <= 1
