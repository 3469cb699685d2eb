"""Settings of the job that decide whether a run is resumed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from dsa_job import runs
from dsa_job.folders import Run, open_run


def start(output: Path, settings: dict, step: int | None = None) -> Run:
    run = open_run(output, settings, lambda folder: step)
    run.release()
    return run


def test_the_layout_may_change_between_parts_of_a_run() -> None:
    first = argparse.Namespace(lr=0.1, tensor_model_parallel_size=1, output_dir="a", save_interval=1)
    second = argparse.Namespace(lr=0.1, tensor_model_parallel_size=2, output_dir="b", save_interval=9)
    assert runs.settings(first) == runs.settings(second) == {"lr": 0.1}


def chosen(**given: str | int | None) -> dict:
    nothing = {"save": None, "load": None, "ckpt_step": None}
    return runs.settings(argparse.Namespace(lr=0.1, **{**nothing, **given}))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"save": "{0}/other", "load": "{0}/other"}),
        ({}, {"load": "{0}/other"}),
        ({"save": "{0}/mine"}, {}),
        ({"save": "{0}/mine"}, {"save": "{0}/other"}),
        ({"load": "{0}/other"}, {}),
        ({"load": "{0}/other", "ckpt_step": 2}, {"load": "{0}/other", "ckpt_step": 4}),
    ],
)
def test_a_run_does_not_go_on_from_checkpoints_of_another_job(
    tmp_path: Path, first: dict, second: dict
) -> None:
    first, second = (
        {name: str(value).format(tmp_path) for name, value in given.items()} for given in (first, second)
    )
    start(tmp_path / "quick", chosen(**first))
    assert start(tmp_path / "quick", chosen(**first), step=40).resumed
    other = start(tmp_path / "quick", chosen(**second), step=40)
    assert (other.folder, other.resumed) == (tmp_path / "quick-2", False)
    assert "unfinished, with other settings" in other.why


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"save": "{0}/quick/checkpoints"}),
        ({}, {"load": "{0}/quick/checkpoints"}),
        ({"save": "{0}/mine"}, {"save": "{0}/mine/../mine", "load": "{0}/mine"}),
    ],
)
def test_a_run_that_is_told_to_go_on_from_its_own_checkpoints_does(
    tmp_path: Path, first: dict, second: dict
) -> None:
    first, second = (
        {name: value.format(tmp_path) for name, value in given.items()} for given in (first, second)
    )
    (tmp_path / "mine").mkdir()
    start(tmp_path / "quick", chosen(**first))
    assert start(tmp_path / "quick", chosen(**second), step=40).resumed
