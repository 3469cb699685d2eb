"""A run goes on from a checkpoint with its layers dealt to other pipeline stages, and loses nothing."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dsa.runs import expert_load
from tests.distributed.flags import PP2, SHALLOW, ZERO
from tests.distributed.parity import MODEL, TRAINING
from tests.support.pool import WorkerPool

STEPS, FIRST = 4, 2
TODAY, DEALT = ("--pipeline-model-parallel-layout " + layout for layout in ("Et*2|t*2L", "Et|t*3L"))


@pytest.mark.parametrize(
    ("today", "optimizer"),
    [
        pytest.param("", "", id="even"),
        pytest.param(
            TODAY,
            ZERO,
            id="layout, distributed optimizer",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_layout_may_change_at_a_checkpoint(
    pool: WorkerPool, tmp_path: Path, today: str, optimizer: str
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "input.py").write_text(inspect.getsource(argparse))
    data = f"--data {tmp_path / 'text'} --data-cache-path {tmp_path / 'cache'} --train-iters {STEPS}"
    report, saved = str(tmp_path / "load"), tmp_path / "saved"

    def train(flags: str, folder: str = report) -> Any:
        argv = f"{MODEL} {SHALLOW} {TRAINING} {data} {PP2} {optimizer} {flags}".split()
        switches = {"moe_router_load_report": folder}
        return pool.run("tests.support.example_job:train", 2, argv=argv, switches=switches)[0].records

    unbroken = train(today, str(tmp_path / "unbroken"))
    begun = train(f"{today} --save {saved} --exit-interval {FIRST}")
    ended = train(f"{DEALT} --load {saved}")
    for ours, theirs in zip([*begun, *ended], unbroken, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    stages = [[layer["stage"] for layer in record["layers"]] for record in expert_load.read(Path(report))]
    # Layers 2 to 4 have experts.
    assert stages == [[0, 1, 1]] * FIRST + [[1, 1, 1]] * (STEPS - FIRST)
    routed = [[layer["experts"] for layer in record["layers"]] for record in expert_load.read(Path(report))]
    expected = expert_load.read(tmp_path / "unbroken")
    assert routed[0] == [layer["experts"] for layer in expected[0]["layers"]]
