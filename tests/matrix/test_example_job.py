"""The example job on every release: one process resumes the checkpoint of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.conftest import JobServer, records
from tests.examples.conftest import text_folder as text_folder

pytestmark = pytest.mark.releases(">=0.12.1,!=0.16.*")  # tests/examples runs it on 0.16

LAYOUTS = {
    "PP2": "--pipeline-model-parallel-size 2",
    "TP2+SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "CP2": "--context-parallel-size 2",
    "EP2": "--expert-model-parallel-size 2",
}


@pytest.fixture(scope="module")
def jobs(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    server = JobServer(text_folder, tmp_path_factory.mktemp("jobs"))
    yield server
    server.close()


def _needs(layout: str) -> Any:
    """Require 0.14 for EP2: expert optimizer states have had layout-independent names since then."""
    return pytest.param(layout, marks=pytest.mark.releases(">=0.14,!=0.16.*") if layout == "EP2" else ())


@pytest.mark.parametrize("layout", list(map(_needs, LAYOUTS)))
def test_one_process_goes_on_as_two_ranks_do(layout: str, jobs: JobServer, tmp_path: Path) -> None:
    """Losses and norms after a resume at step 2 of 4 do not depend on the number of ranks."""
    flags, saved = LAYOUTS[layout].split(), tmp_path / "saved"
    _train(jobs, saved, "--train-iters", "2", "--lr-decay-iters", "4", *flags, ranks=2)
    further = ["--load", str(saved / "checkpoints"), "--train-iters", "4", "--lr-decay-iters", "4"]
    _train(jobs, tmp_path / "two", *further, *flags, ranks=2)
    _train(jobs, tmp_path / "one", *further)
    two, one = (
        [(record["lm_loss"], record["grad_norm"]) for record in records(tmp_path / run)]
        for run in ("two", "one")
    )
    assert len(two) == 2
    # In a model this small, the last bit can change the selection of experts and keys.
    assert one == [pytest.approx(step, rel=1e-3) for step in two]


def _train(jobs: JobServer, run: Path, *flags: str, ranks: int = 1) -> None:
    done = jobs.start(run, *flags, ranks=ranks)
    assert [each.code for each in done] == [0] * ranks, done[0].output
