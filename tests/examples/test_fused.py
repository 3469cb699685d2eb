"""Fused DSA and the warmup stage in the example job, across checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.pool import WorkerPool

from .conftest import JobServer, records

FUSED, STOCK = "--use-fused-dsa", "--no-use-fused-dsa"
# Attention far from uniform, so that indexers have something to learn.
WIDE = ("--init-method-std", "0.3")


def losses(run: Path, name: str = "lm_loss") -> list[float]:
    return [record[name] for record in records(run)]


@pytest.fixture(scope="module")
def unbroken(jobs: JobServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock") / "run"
    finished = jobs.run(folder, *WIDE, STOCK)
    assert finished.code == 0, finished.output
    return folder


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([FUSED], [FUSED, "--no-use-dsa-absorb"], marks=pytest.mark.full),
        ([STOCK], ["--dsa-fuse-kl-in-backward"]),
        pytest.param([], [STOCK], marks=pytest.mark.full),
    ],
    ids=["absorb off", "fused on", "fused off"],
)
def test_switches_may_change_across_a_resume(
    jobs: JobServer, unbroken: Path, tmp_path: Path, before: list[str], after: list[str]
) -> None:
    run = tmp_path / "run"
    first = jobs.run(run, *WIDE, *before, "--exit-interval", "2")
    assert first.code == 0, first.output
    assert ("\nfused-dsa " in first.output) == (STOCK not in before)
    finished = jobs.run(run, *WIDE, *after)
    assert finished.code == 0, finished.output
    assert ("\nfused-dsa " in finished.output) == (STOCK not in after)
    assert f"resuming the unfinished run in {run} from step 2" in finished.output
    assert losses(run) == pytest.approx(losses(unbroken), rel=1e-5)
    assert losses(run, "indexer_loss") == pytest.approx(losses(unbroken, "indexer_loss"), rel=1e-3)


@pytest.mark.full
def test_sparse_training_goes_on_from_a_warmup(jobs: JobServer, pool: WorkerPool, tmp_path: Path) -> None:
    warm, sparse = tmp_path / "warm", tmp_path / "sparse"
    flags = [*WIDE, "--lr", "1e-2", "--lr-decay-style", "constant"]
    finished = jobs.run(warm, "--dsa-stage", "warmup", *flags)
    assert finished.code == 0, finished.output
    trained = losses(warm, "indexer_loss")
    assert trained[-1] < 0.9 * trained[0]

    finished = jobs.run(sparse, FUSED, "--load", str(warm / "checkpoints"), "--train-iters", "8")
    assert finished.code == 0, finished.output
    assert "\nfused-dsa " in finished.output
    first, last = (_weights(pool, warm, step) for step in (2, 6))
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert changed == {name for name in first if ".indexer." in name}
    assert all(not torch.equal(last[name], value) for name, value in _weights(pool, sparse, 8).items())


def _weights(pool: WorkerPool, run: Path, step: int) -> dict[str, torch.Tensor]:
    (contents,) = pool.run(
        "tests.support.example_job:read", 1, checkpoints=[(str(run / "checkpoints"), step)]
    )
    return {
        name: value
        for name, value in contents[0].items()
        if not name.startswith("optimizer") and value.is_floating_point()
    }
