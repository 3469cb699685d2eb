"""A killed run resumes from its last checkpoint as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from dsa_job.checkpoints import complete_steps, folder_of, latest

from .conftest import JobServer, records, results, wait_for


@pytest.fixture(scope="module")
def unbroken(jobs: JobServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    finished = jobs.run(folder, "--no-async-save")
    assert finished.code == 0, finished.output
    assert [record["step"] for record in records(folder)] == [1, 2, 3, 4, 5, 6]
    return folder


def assert_resumes_like(unbroken: Path, run: Path, jobs: JobServer, step: int) -> None:
    finished = jobs.run(run)
    assert finished.code == 0, finished.output
    assert f"resuming the unfinished run in {run} from step {step}" in finished.output
    assert results(run) == results(unbroken)  # bitwise: JSON keeps every digit
    assert records(run, "heldout.jsonl") == records(unbroken, "heldout.jsonl")
    assert not list((run / "checkpoints").glob(".*"))  # nothing half written is left
    assert final_tensors(run) == final_tensors(unbroken)


def final_tensors(run: Path) -> bytes:
    """Return the file of the last checkpoint with weights and optimizer."""
    return (folder_of(run / "checkpoints", 6) / "__0_0.distcp").read_bytes()


@pytest.mark.full
def test_killed_again_and_again(jobs: JobServer, unbroken: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    # In the write of the checkpoint of step 4, at three places; each run resumes from step 2.
    for place in ("before the weights", "before the rename", "before the tracker"):
        finished = jobs.run(run, fault=place)
        assert finished.code == -signal.SIGKILL, finished.output
        assert latest(checkpoints) == 2
        assert complete_steps(checkpoints) == ([2, 4] if place == "before the tracker" else [2])
        # The half-written folder of the last process is gone, and this process's folder is there.
        assert len(list(checkpoints.glob(".iter_*"))) == (place != "before the tracker")

    # Between two checkpoints.
    def kill(pids: Sequence[int], output: Path) -> None:
        wait_for(lambda: "step     5/6" in output.read_text())
        os.kill(pids[0], signal.SIGKILL)

    flags = ("--save-interval", "4", "--no-async-save")
    assert jobs.run(run, *flags, while_running=kill).code == -signal.SIGKILL
    # A partial line, as a killed process leaves it.
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lm_')
    assert_resumes_like(unbroken, run, jobs, step=4)


@pytest.mark.full
def test_a_rank_killed_in_a_write_of_shards(jobs: JobServer, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    layout = ("--use-distributed-optimizer", "--train-iters", "6")
    finished = jobs.start(whole, *layout, ranks=2)
    assert [job.code for job in finished] == [0, 0], finished[0].output + finished[1].output
    # Rank 0 dies with all shards written and none of them named; rank 1 waits in vain.
    first, second = jobs.start(run, *layout, ranks=2, fault="before the rename")
    assert (first.code, second.code) == (-signal.SIGKILL, 1), first.output + second.output
    assert latest(run / "checkpoints") == 2
    assert complete_steps(run / "checkpoints") == [2]
    finished = jobs.start(run, *layout, ranks=2)
    assert [job.code for job in finished] == [0, 0], finished[0].output + finished[1].output
    assert f"resuming the unfinished run in {run} from step 2" in finished[0].output
    assert len(records(run)) == 6
    for resumed, unbroken_one in zip(results(run), results(whole), strict=True):
        assert resumed == pytest.approx(unbroken_one, rel=0, abs=1e-6)
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.full
def test_a_checkpoint_is_of_its_step_however_late_it_is_written(
    jobs: JobServer, unbroken: Path, tmp_path: Path
) -> None:
    """Each is written after training has made its next steps; the job waits for the last write."""
    run = tmp_path / "run"
    finished = jobs.run(run, fault="written late")
    assert finished.code == 0, finished.output
    assert results(run) == results(unbroken)
    for step in (2, 4, 6):
        late, at_once = (folder_of(each / "checkpoints", step) / "__0_0.distcp" for each in (run, unbroken))
        assert late.read_bytes() == at_once.read_bytes()
    assert latest(run / "checkpoints") == 6


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        pytest.param("in the writer", "its writer has ended without a word", marks=pytest.mark.full),
        pytest.param("full disk", "File too large", marks=pytest.mark.full),
        pytest.param("vanished folder", "No such file or directory", marks=pytest.mark.full),
    ],
)
def test_what_cannot_be_written_ends_the_job_in_one_line(
    jobs: JobServer, unbroken: Path, tmp_path: Path, fault: str, why: str
) -> None:
    run = tmp_path / "run"
    finished = jobs.run(run, fault=fault)
    assert finished.code == 2, finished.output
    assert "Traceback" not in finished.output
    (line,) = (line for line in finished.output.splitlines() if "was not written (rank 0: " in line)
    assert why in line
    assert "make room, or name another folder with --save" in line
    assert latest(run / "checkpoints") == 2
    assert_resumes_like(unbroken, run, jobs, step=2)


@pytest.mark.full
def test_a_writer_ends_with_its_job(jobs: JobServer, unbroken: Path, tmp_path: Path) -> None:
    """Otherwise it would hold the lock of the run's folder, and the next job would begin another run."""
    run, writer = tmp_path / "run", []

    def kill(pids: Sequence[int], output: Path) -> None:
        wait_for(lambda: "step     5/6" in output.read_text())
        writer.append(int(output.read_text().partition("writer ")[2].split()[0]))
        os.kill(pids[0], signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{writer[0]}").exists())

    assert jobs.run(run, fault="never written", while_running=kill).code == -signal.SIGKILL
    assert latest(run / "checkpoints") == 2
    assert_resumes_like(unbroken, run, jobs, step=2)


def test_ctrl_c_saves_and_the_run_goes_on(jobs: JobServer, unbroken: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def interrupt(pids: Sequence[int], output: Path) -> None:
        wait_for(lambda: "step     1/6" in output.read_text())
        os.kill(pids[0], signal.SIGINT)

    finished = jobs.run(run, "--save-interval", "0", while_running=interrupt)
    assert finished.code == 130, finished.output
    step = latest(run / "checkpoints")
    assert step is not None
    assert f"stopped by Ctrl-C after step {step}; a checkpoint is in" in finished.output
    assert_resumes_like(unbroken, run, jobs, step)
