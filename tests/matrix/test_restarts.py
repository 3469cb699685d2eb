"""Megatron-LM's own loop under ``torchrun --max-restarts``: a killed rank changes no final weight."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from mindspeed_dsa.runs import metrics
from mindspeed_dsa.runs.whole_checkpoints import name_of, tracked
from tests.examples.conftest import wait_for
from tests.examples.test_restarts import OWN_STORE, RESTARTING, ranks_of, steps_of
from tests.matrix.record import Note
from tests.matrix.test_pretrain_gpt import LAYOUT, checkout, job, pretrain
from tests.matrix.test_whole_checkpoints import asynchronous, tensors

STEPS = 16
LAYOUTS = {
    "TP2+SP": LAYOUT,
    "PP2": "--pipeline-model-parallel-size 2",
    # Megatron-LM's other format has padding between parameters that is never written.
    "EP2": "--expert-model-parallel-size 2 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.releases(">=0.16", quick=True),
    pytest.mark.skipif(checkout() is None, reason="MEGATRON_LM names no checkout of the installed release"),
]


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_killed_rank_changes_no_weight(
    name: str, note: Note, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves are asynchronous: the process that writes a save may be killed with its rank."""
    note.begins(f"pretrain_gpt.py, {name}", "whole-checkpoints")
    flags = f"--whole-checkpoints --ckpt-format torch_dist --save-interval 2 {asynchronous()}"
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    whole = pretrain(tmp_path / "whole", f"{flags} --save {unbroken}", LAYOUTS[name], steps=STEPS)
    monkeypatch.setenv("TORCHRUN", " ".join((*RESTARTING, "--nproc-per-node", "2")))
    for variable, value in OWN_STORE.items():
        monkeypatch.setenv(variable, value)
    folder = tmp_path / "restarted"
    command, environment = job(folder, f"{flags} --save {broken} --load {broken}", LAYOUTS[name], steps=STEPS)
    chance = random.Random(name)
    with open(folder / "output.txt", "wb") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    said = (folder / "output.txt").read_text
    file = folder / "steps.jsonl"
    try:
        for step in sorted(chance.sample(range(4, STEPS - 2), 2)):
            wait_for(lambda step=step: launcher.poll() is not None or step in steps_of(file))
            assert launcher.poll() is None, said()
            victim = chance.choice(ranks_of(launcher))
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda victim=victim: victim not in ranks_of(launcher))
        assert launcher.wait(timeout=400) == 0, said()
    finally:
        launcher.kill()
    assert "is loaded: whole" in said(), said()
    assert tracked(broken) == (STEPS, "")
    last = {record["step"]: record["lm_loss"] for record in metrics.read(file)}
    assert last == {record["step"]: record["lm_loss"] for record in whole["steps"]}
    mine, theirs = (tensors(each / name_of(STEPS)) for each in (broken, unbroken))
    assert mine.keys() == theirs.keys()
    assert [key for key, tensor in mine.items() if not torch.equal(tensor, theirs[key])] == []
    note.trained([whole])
