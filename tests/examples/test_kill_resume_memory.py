"""A killed run with memory features resumes as if nothing had happened, with them or without."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from dsa_job.checkpoints import folder_of, latest

from .conftest import JobServer, records, results
from .test_kill_resume import final_tensors

JOB = ("--bf16", "--use-distributed-optimizer")
ACTIVATIONS = (
    *("--recompute-activation-function", "--recompute-norm"),
    *("--swap-attention", "--swap-attention-min-bytes", "0"),
)
FEATURES = {
    "reuse-fp32-param": ("--reuse-fp32-param", "--virtual-optimizer", "all", *ACTIVATIONS),
    "swap-optimizer": ("--swap-optimizer", *ACTIVATIONS),
}


@pytest.fixture(scope="module")
def plain(jobs: JobServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unbroken run without any memory feature."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    finished = jobs.run(folder, *JOB, "--no-async-save")
    assert finished.code == 0, finished.output
    assert len(records(folder)) == 6
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", FEATURES)
def test_killed_in_the_write_of_a_checkpoint(jobs: JobServer, plain: Path, tmp_path: Path, name: str) -> None:
    run, other = tmp_path / "run", tmp_path / "without"
    killed = jobs.run(run, *JOB, *FEATURES[name], fault="before the rename")  # at step 4
    assert killed.code == -signal.SIGKILL, killed.output
    assert f"\n{name} " in killed.output, "the start table does not name it"
    assert latest(run / "checkpoints") == 2
    without = jobs.run(other, *JOB, "--load", str(run / "checkpoints"))
    assert without.code == 0, without.output
    finished = jobs.run(run, *JOB, *FEATURES[name])
    assert finished.code == 0, finished.output
    assert f"resuming the unfinished run in {run} from step 2" in finished.output
    assert results(run) == results(plain)  # bitwise: JSON keeps every digit
    assert results(other) == results(plain)[2:]
    assert final_tensors(run) == final_tensors(other) == final_tensors(plain)


@pytest.mark.full
@pytest.mark.parametrize("job", [JOB, JOB[:1]], ids=["distributed", "plain"])
@pytest.mark.parametrize("name", FEATURES)
def test_a_checkpoint_is_of_its_step_however_late_it_is_written(
    jobs: JobServer, tmp_path: Path, name: str, job: tuple[str, ...]
) -> None:
    """Steps before the write change in place the state that a feature keeps elsewhere."""
    runs = tmp_path / "at-once", tmp_path / "late"
    for run, flag, fault in zip(runs, (["--no-async-save"], []), (None, "written late"), strict=True):
        finished = jobs.run(run, *job, *FEATURES[name], *flag, fault=fault)
        assert finished.code == 0, finished.output
    for step in (2, 4, 6):
        at_once, late = (folder_of(run / "checkpoints", step) / "__0_0.distcp" for run in runs)
        assert late.read_bytes() == at_once.read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("name", FEATURES)
def test_a_checkpoint_without_features_goes_on_with_them(
    jobs: JobServer, plain: Path, tmp_path: Path, name: str
) -> None:
    load = ("--load", str(plain / "checkpoints"), "--ckpt-step", "2")
    finished = jobs.run(tmp_path / "run", *JOB, *FEATURES[name], *load)
    assert finished.code == 0, finished.output
    assert results(tmp_path / "run") == results(plain)[2:]
    assert final_tensors(tmp_path / "run") == final_tensors(plain)
