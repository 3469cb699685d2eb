"""Records of a job in which a rank is killed, fails or is frozen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mindspeed_dsa.__main__ import main
from tests.features.diagnostics.collectives.late_ranks import JOBS, LATE, ranks_of
from tests.support.ports import free_port

pytestmark = pytest.mark.full
ENDS_WITHIN_S = 60
"""Time limit in seconds on a busy machine; gloo notices a broken connection at once."""


@pytest.fixture
def job(tmp_path):
    """Return a function that starts the ranks of a step, one of which is lost."""
    started: list[subprocess.Popen[str]] = []

    def start(fate: str, case: str = "EP, pairs", apart: bool = False) -> list[subprocess.Popen[str]]:
        ranks = ranks_of(case)
        environment = {
            **os.environ,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(ranks),
        }
        environment |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        for rank in range(ranks):
            command = [
                sys.executable,
                "-m",
                "tests.features.diagnostics.collectives.late_ranks",
                str(tmp_path / str(rank) if apart else tmp_path),
                fate,
                case,
            ]
            started.append(
                subprocess.Popen(
                    command, env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
                )
            )
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(ranks: list[subprocess.Popen[str]]) -> str:
    """Wait until broken connections end the surviving ranks; return the output of the first one."""
    ranks[LATE].wait(timeout=180)
    said = []
    for survivor in (process for rank, process in enumerate(ranks) if rank != LATE):
        # In a chain, the end of one rank breaks the connection of the next.
        said.append(survivor.communicate(timeout=ENDS_WITHIN_S * (len(ranks) - 1))[1])
        assert survivor.returncode not in (0, None)
    return said[0]


def test_a_rank_that_fails_is_the_cause(job, tmp_path, capsys):
    ranks = job("failed")
    wait_for(ranks)
    assert ranks[LATE].returncode == 1
    assert main(["hang", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"rank {LATE} wrote because of: failed with ValueError: a bad batch" in text
    assert f"It began with rank {LATE}." in text
    assert "dispatch of layer 2, microbatch 1, forward beside microbatch 0, backward" in text


@pytest.mark.parametrize(
    "case",
    [
        *("TP", "TP, Megatron's", "PP", "CP", "DP", "EP", "EP, halves", "EP, pairs"),
        *("EP, chains", "EP, chain of 4 ranks", "EP, chain of 4 ranks, backward"),
    ],
)
def test_a_killed_rank_is_named_in_every_group(job, tmp_path, capsys, case):
    # A killed rank writes no record; its last calls are in its call file.
    ranks = job("killed", case)
    said = wait_for(ranks)
    assert ranks[LATE].returncode == -signal.SIGKILL
    assert "see python -m mindspeed_dsa hang" in said
    assert main(["hang", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    print(text)
    assert f"no record of rank {LATE}: ended, killed or frozen" in text
    assert f"Look at rank {LATE} first" in text
    assert f"rank {LATE} has not: it stood " in text
    assert JOBS[case][1] in text


def test_a_frozen_rank_is_named_by_the_others(job, tmp_path, capsys):
    # A frozen process cannot write, so the ranks that wait for it report its silence.
    job("frozen")
    until, text = time.time() + 180, ""
    while f"rank {LATE} has not: it stood " not in text and time.time() < until:
        time.sleep(0.5)  # a busy machine may be silent before the call, and writes that, too
        main(["hang", str(tmp_path)])
        text = capsys.readouterr().out
    assert f"no record of rank {LATE}: ended, killed or frozen" in text
    assert f"rank {LATE} has not: it stood " in text
    assert f"Look at rank {LATE} first" in text


def test_folders_of_machines_are_copied_to_one(job, tmp_path, capsys):
    wait_for(job("killed", apart=True))
    for machine in ("0", "1"):
        shutil.copytree(tmp_path / machine, tmp_path / "both", dirs_exist_ok=True)
    assert main(["hang", str(tmp_path / "both")]) == 0
    text = capsys.readouterr().out
    assert f"rank {LATE} has not: it stood " in text
    assert f"Look at rank {LATE} first" in text
