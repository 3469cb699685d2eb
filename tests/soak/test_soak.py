"""The soak on a job of milliseconds: its disturbances, and the faults that it finds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.soak.damage import DAMAGE
from tests.soak.disturbances import KINDS, draw
from tests.soak.layouts import ROOT

KILLS = ("rank", "parent", "save", "term")


def soak(
    folder: Path, *flags: str, fault: str = "", write_s: float = 0.05
) -> tuple[int, dict[str, Any], str]:
    """Run the soak in a separate process, which takes namespaces; return code, counts and output."""
    command = [sys.executable, "-m", "tests.soak.stub_job", "--folder", str(folder), *flags]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "STUB_FAULT": fault, "STUB_WRITE_S": str(write_s)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ, cwd=ROOT)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_killed_and_damaged_it_ends_as_the_unbroken_run(tmp_path: Path) -> None:
    flags = ("--runs", "1", "--layouts", "tp", "--kinds", *KILLS, *DAMAGE, "--disturbances", "8")
    code, counts, output = soak(tmp_path, *flags)
    assert code == 0, output
    assert counts["finished"] == {"tp": 1}
    assert counts["kills"] == sum(counts["disturbances"].values()) >= 5
    assert sum(counts["starts"].values()) > 4
    assert counts["passed_over"]
    assert counts["steps_repeated"] > 0
    assert json.loads((tmp_path / "counts.json").read_text()) == counts
    assert not list(tmp_path.glob("failed-*"))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone(tmp_path: Path, kind: str) -> None:
    write_s = 0.5 if kind == "writer" else 0.05
    code, counts, output = soak(
        tmp_path, "--runs", "1", "--kinds", kind, "--disturbances", "3", write_s=write_s
    )
    if kind == "link" and "slow link" in counts["skipped"]:
        pytest.skip(counts["skipped"]["slow link"])
    assert code == 0, output
    assert counts["disturbances"][kind] >= 1
    if kind in DAMAGE:
        assert counts["passed_over"], output
    if KINDS[kind].goes_on:
        assert counts["starts"] == {"command": 1, "torchrun": 0}


FOUND = {
    "other weights": ("tracker", "metrics.jsonl differs from the unbroken run's"),
    "anew": ("tracker", "began anew where there was a checkpoint of step"),
    "unread": ("flipped", "a damaged checkpoint was loaded, or not named"),
    "traceback": ("rank", ": ValueError: a bad batch"),
    "orphan": ("stop", "outlive their launcher"),
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[] if fault == "other weights" else pytest.mark.full) for fault in FOUND],
)
def test_what_must_not_happen_is_found(tmp_path: Path, fault: str) -> None:
    kind, message = FOUND[fault]
    flags = ("--runs", "1", "--layouts", "tp", "--kinds", kind, "--disturbances", "3")
    code, counts, output = soak(tmp_path, *flags, fault=fault)
    assert code == 1, output
    (failure,) = counts["failures"]
    assert message in failure["what"], output
    assert failure["seed"] == 1
    assert list(Path(failure["folder"]).rglob("stdout.log"))


@pytest.mark.full
def test_a_job_that_stands_still_is_found(tmp_path: Path) -> None:
    flags = ("--runs", "1", "--layouts", "tp", "--kinds", "writer", "--patience", "10")
    code, counts, output = soak(tmp_path, *flags, fault="hang")
    assert code == 1, output
    assert "the job made no step for 10 s" in counts["failures"][0]["what"]


def test_a_seed_draws_the_same_disturbances() -> None:
    first, again, other = (draw(list(KINDS), 20, random.Random(seed)) for seed in ("1-1", "1-1", "1-2"))
    assert first == again
    assert first != other
