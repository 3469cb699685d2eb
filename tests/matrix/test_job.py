"""The main example job on releases without DSA of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "switches", [["--use-fused-dsa"], ["--dsa-bring-along", "--no-use-fused-dsa"]], ids=["fused", "plain"]
)
def test_the_example_job_trains(tmp_path, switches):
    command = [
        sys.executable,
        str(ROOT / "examples/pretrain_dsa.py"),
        "--train-iters",
        "6",
        "--no-save",
    ]
    done = subprocess.run(
        [*command, *switches, "--output-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = (line for line in done.stdout.splitlines() if "lm loss" in line)
    assert _figure(last, "lm loss") < _figure(first, "lm loss") - 1
    assert _figure(last, "indexer loss") > 0


def _figure(line: str, name: str) -> float:
    return float(line.partition(f"{name} ")[2].split()[0])
