"""A job with killed ranks ends with the unbroken run's weights, under ``torchrun --max-restarts``."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from mindspeed_dsa.runs.metrics import FILE
from mindspeed_dsa.runs.whole_checkpoints import TRACKER
from tests.matrix.test_whole_checkpoints import tensors

from .conftest import JobServer, records, results, wait_for
from .test_launch import torchrun

STEPS = 24
LAYOUTS = {
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--pipeline-model-parallel-size 2",
    "EP2": "--expert-model-parallel-size 2 --use-distributed-optimizer",
    "DP2, FSDP2": "--use-torch-fsdp2",
}
# Otherwise ranks of a new attempt find addresses of killed ones in the store, and never meet.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RESTARTING = ("--standalone", "--max-restarts", "3")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_killed_at_random_steps_and_restarted(jobs: JobServer, tmp_path: Path, name: str) -> None:
    flags = [*LAYOUTS[name].split(), "--train-iters", str(STEPS), "--save-interval", "2"]
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    whole = torchrun(2, jobs.arguments(unbroken, *flags), tmp_path / "whole.txt")
    chance = random.Random(name)
    kill_steps = sorted(chance.sample(range(3, STEPS // 2), 2))
    saved = broken / "checkpoints" / TRACKER  # without a checkpoint a job begins another run
    output = tmp_path / "output.txt"
    job = torchrun(2, jobs.arguments(broken, *flags), output, *RESTARTING, **OWN_STORE)
    for step in kill_steps:
        wait_for(
            lambda step=step: job.poll() is not None or (saved.exists() and step in steps_of(broken / FILE))
        )
        assert job.poll() is None, output.read_text()
        victim = chance.choice(ranks_of(job))
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda victim=victim: victim not in ranks_of(job))
    assert whole.wait(timeout=400) == 0, (tmp_path / "whole.txt").read_text()
    assert job.wait(timeout=400) == 0, output.read_text()
    assert output.read_text().count("resuming the unfinished run") >= 1
    assert results(broken) == results(unbroken)
    assert records(broken, "heldout.jsonl") == records(unbroken, "heldout.jsonl")
    mine, theirs = (tensors(run / "checkpoints" / f"iter_{STEPS:07d}") for run in (broken, unbroken))
    assert mine.keys() == theirs.keys()
    assert [key for key, tensor in mine.items() if not torch.equal(tensor, theirs[key])] == []


def steps_of(file: Path) -> list[int]:
    """Return the steps in a file of metrics so far; the last line may be incomplete."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Return the process ids of a launcher's children, in order."""
    children = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in children.stdout.split()]
