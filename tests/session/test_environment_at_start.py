"""Environment findings at a job's start: reported once, by one rank, and recorded."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_dsa import log
from mindspeed_dsa.environment import Machine
from mindspeed_dsa.session import environment
from mindspeed_dsa.session.start_report import REPORT_FILE
from tests.support import warm

ROOT = Path(__file__).parents[2]
SETTINGS = SimpleNamespace(platform="cpu", megatron_root="megatron")
CROWDED = Machine(processors=2, local_ranks=2, world=4)
"""A node whose ranks have too many threads."""


@pytest.fixture
def start(monkeypatch, capsys):
    """Start a job on one rank and return the lines that it prints."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setattr(environment.installation, "read", lambda *args, **kwargs: CROWDED)
    log.forget()

    def starting(rank, local_rank):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        environment.at_start(SETTINGS, (), SimpleNamespace(), lambda args: None)
        return [line for line in capsys.readouterr().err.splitlines() if "environment" in line]

    return starting


def test_the_first_rank_speaks_for_the_job_and_its_node_and_once(start):
    debugging, threads = start(0, 0)
    assert debugging.startswith("mindspeed_dsa: environment: warning: TORCH_DISTRIBUTED_DEBUG=DETAIL: ")
    assert debugging.endswith("[distributed-debug]")
    assert threads.endswith("[processor-threads]")
    assert start(0, 0) == []


def test_the_first_rank_of_another_node_speaks_for_that(start):
    (threads,) = start(2, 0)
    assert f"environment of node {socket.gethostname()}: warning: OMP_NUM_THREADS" in threads


def test_other_ranks_say_nothing(start):
    assert start(1, 1) == []
    assert start(3, 1) == []


def test_the_newest_checkpoint_is_measured_where_there_is_one(tmp_path):
    from mindspeed_dsa.runs import manifest

    fresh = SimpleNamespace(save=str(tmp_path), load=None)
    assert environment.newest(fresh) == (0, None)
    assert environment.newest(SimpleNamespace(save="s3://bucket/x")) == (0, None)
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1000))
    assert environment.newest(fresh) == (0, None), "without a manifest nobody knows"
    manifest.write(folder, "job", manifest.sums(folder, manifest.names(folder)))
    assert environment.newest(fresh) == (0, 1000)
    assert environment.newest(SimpleNamespace(save=str(tmp_path), load=str(tmp_path))) == (3, 1000)
    (folder / manifest.NAME).write_text("no manifest", encoding="utf-8")
    assert environment.newest(fresh) == (0, None), "which loading reports"


def test_what_goes_wrong_stops_no_job(start, monkeypatch):
    monkeypatch.setattr(environment.installation, "read", lambda *args: 1 / 0)
    assert "environment: not examined: ZeroDivisionError" in start(0, 0)[0]


SMALL_DISK = """\
import runpy, sys
sys.path.insert(0, {examples!r})
from mindspeed_dsa.session.environment import installation
installation._free = lambda folder: 10**6
if __name__ == "__main__":
    runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.full
def test_a_job_with_a_finding_of_each_level(tmp_path):
    script = tmp_path / "pretrain_dsa.py"  # its name selects the job's defaults
    examples = ROOT / "examples"
    script.write_text(
        SMALL_DISK.format(examples=str(examples), script=str(examples / script.name)), encoding="utf-8"
    )
    flags = ["--train-iters", "2", "--eval-iters", "0", "--output-dir", str(tmp_path / "run")]
    job = [str(script), *flags, "--save", str(tmp_path / "saves")]
    launcher = ["torchrun", "--nproc-per-node", "2"]
    variables = {
        **os.environ,
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": str(os.cpu_count()),
    }
    wanted = [("error", "free-disk"), ("warning", "distributed-debug"), ("note", "processor-threads")]
    if os.cpu_count() == 1:  # one thread per rank is all there is
        wanted.pop()

    run = [sys.executable, "-m", "torch.distributed.run", *launcher[1:], *job]
    done = subprocess.run(run, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = re.findall(r"environment: (\w+): .* \[([\w-]+)\]$", done.stderr, re.MULTILINE)
    assert told == wanted, "each once, the worst first, by one rank of the two"
    record = json.loads((tmp_path / "run" / REPORT_FILE).read_text(encoding="utf-8"))
    assert [(finding["level"], finding["check"]) for finding in record["environment"]] == wanted

    # doctor sees the real size of the disk.
    doctor = [sys.executable, "-m", "mindspeed_dsa", "doctor", "--json", "--job", "--", *launcher, *job]
    done = warm.run(doctor, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [(finding["level"], finding["check"]) for finding in json.loads(done.stdout)["environment"]]
    assert found == wanted[1:]


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, (1, 1, 1)),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, (8, 16, 2)),
        ({"WORLD_SIZE": "16"}, (0, 16, 1)),  # one node or 16
    ],
)
def test_no_nodes_are_made_up_where_the_launcher_does_not_say_how_many_ranks_each_has(variables, ranks):
    machine = environment._machine(SETTINGS, variables)
    assert (machine.local_ranks, machine.world, machine.nodes) == ranks
