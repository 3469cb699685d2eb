"""The script itself, started as a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_dsa.__main__ import main
from tests.support import warm
from tests.support.ports import free_port

from .conftest import ROOT, JobServer, records, wait_for

SCRIPT = str(ROOT / "examples" / "pretrain_dsa.py")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def torchrun(
    ranks: int, arguments: list[str], output: Path, *flags: str, **environ: str
) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *flags]
    with open(output, "wb") as file:
        return subprocess.Popen(
            [*launcher, "--master-port", str(free_port()), SCRIPT, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**ENVIRON, **environ},
        )


def finished(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the script in a separate process, to its end."""
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=ENVIRON, timeout=200
    )


def test_the_script_trains(jobs: JobServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = finished(jobs.arguments(run, "--train-iters", "2"))
    assert done.returncode == 0, done.stderr
    assert "training loss" in done.stdout
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_a_model_that_needs_a_repair_that_is_off_names_the_switch(jobs: JobServer, tmp_path: Path) -> None:
    done = finished(jobs.arguments(tmp_path / "run", "--no-dsa-repairs", "spec-dispatch"))
    assert done.returncode == 2, done.stderr
    assert "without the repairs that --no-dsa-repairs spec-dispatch leaves out; omit it" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_shows_the_flags_of_job_and_library() -> None:
    done = warm.run([sys.executable, SCRIPT, "--help"], env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert "--dsa-indexer-topk" in done.stdout
    assert "--dsa-indexer-rope-first" in done.stdout


@pytest.mark.full
def test_torchrun_ends_when_a_rank_dies(
    jobs: JobServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of collectives name the killed rank."""
    run, output = tmp_path / "run", tmp_path / "output"
    layout = ["--pipeline-model-parallel-size", "2", "--train-iters", "100000"]
    layout += ["--record-collectives", str(tmp_path / "collectives")]
    process = torchrun(2, jobs.arguments(run, *layout), output)
    wait_for(lambda: "step     1/" in output.read_text())
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    assert process.wait(timeout=300) != 0
    assert main(["hang", str(tmp_path / "collectives")]) == 0
    assert "Look at rank 1 first" in capsys.readouterr().out


@pytest.mark.full
def test_ctrl_c_under_torchrun_saves(jobs: JobServer, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    layout = ["--pipeline-model-parallel-size", "2", "--save-interval", "0", "--train-iters", "100000"]
    process = torchrun(2, jobs.arguments(run, *layout), output)
    wait_for(lambda: "step     1/" in output.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) != 0
    saved = int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved == records(run)[-1]["step"]
    assert f"stopped by Ctrl-C after step {saved}" in output.read_text()


@pytest.mark.full
def test_a_refusal_at_import_is_said_once_with_status_2(jobs: JobServer, tmp_path: Path) -> None:
    """Holds even if silent ranks end first: torchrun then ends all others."""
    output = tmp_path / "output.txt"
    process = torchrun(2, jobs.arguments(tmp_path / "run", "--coc-parallel-num", "x"), output)
    assert process.wait(timeout=200) != 0
    text = output.read_text()
    assert text.count("invalid int value: 'x'") == 1, text
    assert "pretrain_dsa.py: mindspeed_dsa: argument --coc-parallel-num" in text
    assert re.search(r"local_rank: 0\)\s+exitcode  : 2 ", text), text
