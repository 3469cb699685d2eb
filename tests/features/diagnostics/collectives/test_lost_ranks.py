"""A rank that is killed, fails or is frozen: what the others print, how soon they end, what records say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mindspeed_dsa.__main__ import main
from tests.features.diagnostics.collectives.late_ranks import LATE
from tests.support.ports import free_port

pytestmark = pytest.mark.full
ENDS_WITHIN_S = 60
"""On a machine that others use, of which ten are the library's."""


@pytest.fixture
def job(tmp_path):
    """Start two ranks of a step, one of which comes to grief in it."""
    started: list[subprocess.Popen[str]] = []

    def start(fate: str, case: str = "EP, pairs", apart: bool = False) -> list[subprocess.Popen[str]]:
        environment = {
            **os.environ,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "2",
        }
        environment |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        for rank in range(2):
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


@pytest.mark.parametrize("fate", ["killed", "failed"])
def test_all_ranks_end_with_the_cause_first(job, tmp_path, capsys, fate):
    ranks = job(fate)
    survivor = ranks[1 - LATE]
    ranks[LATE].wait(timeout=180)
    ended = time.time()
    _, said = survivor.communicate(timeout=ENDS_WITHIN_S)
    assert time.time() - ended < ENDS_WITHIN_S
    assert survivor.returncode not in (0, None)
    assert ranks[LATE].returncode == (-signal.SIGKILL if fate == "killed" else 1)
    assert "Traceback" not in said
    assert "Connection" not in said.partition("is gone")[0]
    if fate == "killed":  # what failed has said so itself, perhaps first
        assert f"mindspeed_dsa: rank {LATE} is gone: process {ranks[LATE].pid} on " in said
    assert main(["hang", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    cause = "was killed, as by SIGKILL" if fate == "killed" else "it failed with ValueError: a bad batch"
    assert text.splitlines()[1].startswith(f"rank {LATE} is gone: ")
    assert cause in text.splitlines()[1]
    assert f"It began with rank {LATE}." in text
    assert "dispatch of layer 2, microbatch 1, forward beside microbatch 0, backward" in text


@pytest.mark.parametrize("case", ["TP", "TP, Megatron's", "PP", "CP", "DP", "EP", "EP, halves"])
def test_a_killed_rank_is_named_first_in_every_group(job, case):
    ranks = job("killed", case)
    ranks[LATE].wait(timeout=180)
    ended = time.time()
    assert ranks[LATE].returncode == -signal.SIGKILL
    survivor = ranks[1 - LATE]
    _, said = survivor.communicate(timeout=ENDS_WITHIN_S)
    print(f"{case}: the other had ended after {time.time() - ended:.1f} s")
    assert survivor.returncode not in (0, None)
    # Warnings and the report at the start are older; after the cause nobody says anything.
    cause = said.splitlines()[-1]
    assert cause.startswith(f"mindspeed_dsa: rank {LATE} is gone: process {ranks[LATE].pid} on "), cause
    assert "was killed, as by SIGKILL" in cause
    for word in ("Traceback", "Connection", "Error: ", "terminate called"):
        assert word not in said, said


def test_a_frozen_rank_is_named_by_the_others(job, tmp_path, capsys):
    """Its own process cannot write; silence is noticed where it is waited for."""
    job("frozen")
    record = tmp_path / f"rank-{1 - LATE:05d}.json"
    until = time.time() + 180
    while not record.exists() and time.time() < until:
        time.sleep(0.5)
    assert main(["hang", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"no record of rank {LATE}: killed or frozen" in text
    assert f"rank {LATE} has not, as far as is known" in text
    assert f"Look at rank {LATE} first" in text


def test_a_killed_rank_is_named_where_ranks_share_no_folder(job, tmp_path, capsys):
    """As on machines of their own: a lock says nothing there, and nobody else has been on that machine."""
    ranks = job("killed", apart=True)
    survivor = ranks[1 - LATE]
    ranks[LATE].wait(timeout=180)
    _, said = survivor.communicate(timeout=ENDS_WITHIN_S)
    assert survivor.returncode not in (0, None)
    assert f"mindspeed_dsa: rank {LATE} is gone: process {ranks[LATE].pid} on " in said
    assert "Traceback" not in said
    assert "Connection" not in said
    assert main(["hang", str(tmp_path / str(1 - LATE))]) == 0
    assert f"It began with rank {LATE}." in capsys.readouterr().out
