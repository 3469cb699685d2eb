"""When a rank is killed in a step, the other rank ends and names the event that could not run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.schedule.events import Event, Kind
from tests.features.pipeline.lost_ranks import JOBS, LOST, stops_before
from tests.support.ports import free_port

pytestmark = pytest.mark.full
FORWARD = 4
"""Index of the lost rank's forward, after its warmup."""


@pytest.fixture
def ended():
    """Return a function that starts both ranks and returns the surviving rank's output at its end."""
    started: list[subprocess.Popen[str]] = []

    def start(case: str, folder: str) -> str:
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        shared |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-m", "tests.features.pipeline.lost_ranks", case, str(FORWARD), folder]
        started.extend(
            subprocess.Popen(
                command, env={**os.environ, **shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        )
        _, said = started[1 - LOST].communicate(timeout=300)
        assert started[LOST].wait(timeout=60) == -signal.SIGKILL
        assert started[1 - LOST].returncode not in (0, None)
        return said

    yield start
    for process in started:
        process.kill()
        process.wait()


def in_words(event: Event) -> str:
    """Describe an event as records of collectives do."""
    kinds = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight gradients"}
    chunk = f" of chunk {event.chunk}" if event.chunk else ""
    return f"microbatch {event.microbatch}{chunk}, {kinds[event.kind]}"


@pytest.mark.parametrize("case", [case for case in JOBS if "V" in case])
def test_dualpipev_names_the_event_that_lacks_something(ended, case):
    event, _ = stops_before(case, FORWARD)
    error = ended(case, "").splitlines()
    (line,) = [each for each in error if "LostNeighbourError" in each and "mindspeed_dsa" in each][-1:]
    place = f"{event.kind.name.lower()} of chunk {event.chunk}, microbatch {event.microbatch}"
    assert f"pipeline rank {1 - LOST} waits for rank {LOST}, which is lost, before {place} (stage " in line


@pytest.mark.parametrize("case", JOBS)
def test_records_name_it_too(ended, case, tmp_path, capsys):
    _, before = stops_before(case, FORWARD)
    ended(case, str(tmp_path))
    assert main(["hang", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"no record of rank {LOST}: ended, killed or frozen" in text
    assert f"Look at rank {LOST} first" in text
    assert f"rank {1 - LOST} stands in step 1: after {in_words(before)}" in text
