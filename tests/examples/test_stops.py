"""Failures that end a job, and their messages."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from dsa_job.checkpoints import latest

from .conftest import JobServer, records, wait_for


def test_nan_loss_stops_every_rank_and_names_step_and_rank(jobs: JobServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Only the last pipeline rank computes the loss.
    layout = ("--pipeline-model-parallel-size", "2", "--save-interval", "1")
    first, second = jobs.start(run, *layout, ranks=2, fault="loss")
    assert (first.code, second.code) == (3, 3), first.output + second.output
    assert "step 3: the loss is not a finite number on rank 1;" in first.output
    assert [record["step"] for record in records(run)] == [1, 2]
    assert latest(run / "checkpoints") == 2  # from before the step that failed
    assert not (run / "summary.json").exists()


@pytest.mark.full
def test_a_gradient_that_is_not_finite_is_laid_to_the_rank_it_is_on(jobs: JobServer, tmp_path: Path) -> None:
    layout = ("--pipeline-model-parallel-size", "2", "--no-save")
    finished = jobs.start(tmp_path / "run", *layout, ranks=2, fault="gradient on rank 1")
    assert [job.code for job in finished] == [3, 3], finished[0].output + finished[1].output
    message = "step 3: the gradient norm is not a finite number (gradients of rank 1), the loss was "
    assert message in finished[0].output


@pytest.mark.full
def test_a_gradient_that_overflows_stops_the_run(jobs: JobServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = jobs.run(run, "--lr", "1e30", "--clip-grad", "0", "--save-interval", "1")
    assert finished.code == 3, finished.output
    done = records(run)[-1]["step"]
    assert f"step {done + 1}: the gradient norm is not a finite number" in finished.output
    assert latest(run / "checkpoints") == done


def test_when_one_rank_dies_the_other_ends(jobs: JobServer, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def kill(pids: Sequence[int], output: Path) -> None:
        wait_for(lambda: "step     1/" in output.read_text())
        os.kill(pids[1], signal.SIGKILL)

    first, second = jobs.start(
        run, "--pipeline-model-parallel-size", "2", "--train-iters", "100000", ranks=2, while_running=kill
    )
    assert second.code == -signal.SIGKILL
    assert first.code == 1, first.output
    assert "[rank0]: RuntimeError: " in first.output


def test_a_full_disk_is_one_line_wherever_it_is_noticed(jobs: JobServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = jobs.run(run, fault="no room for metrics")
    assert finished.code == 1, finished.output
    assert "Traceback" not in finished.output
    assert (
        f"No space left on device: '{run / 'metrics.jsonl'}'; checkpoints are as they were" in finished.output
    )
    assert [record["step"] for record in records(run)] == [1, 2]
