"""Tests of the Triton kernels on the device (``TRITON_INTERPRET=0``), compiling on all cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.parts import ROOT

_FILES = (
    *("tests/ops/test_triton_*.py", "tests/ops/test_fp16_gradients.py"),
    "tests/ops/test_dense_attention.py",
)
# These compile ahead of time, or pretend that there are GPUs: they need none.
_WITHOUT = ("test_triton_compile.py", "test_triton_launch.py")
_QUICK = ("test_triton_moe_permute.py",)
# Each process holds half a GiB of the GPU.
_MOST_PROCESSES = 24
# Fraction of the time that is kept to collect results after an interrupt.
_GRACE = 0.1


def files(quick: bool = False) -> list[str]:
    """Return the test files, relative to the repository."""
    paths = sorted(path for pattern in _FILES for path in ROOT.glob(pattern))
    return [
        str(path.relative_to(ROOT))
        for path in paths
        if (path.name in _QUICK if quick else path.name not in _WITHOUT)
    ]


def run(folder: Path, quick: bool, seconds: float) -> dict[str, Any]:
    """Run the tests; return counts by outcome, and the first line of each failure's message.

    Args:
        folder: folder for pytest's output ``tests.log`` and its record of each test.
        quick: one file.
        seconds: time limit; ``error`` says if it ended the tests.
    """
    record = folder / "tests.xml"
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *files(quick), "-m", "full or not full", "-q", "--tb=short"]
    command += [f"--junitxml={record}", "-p", "no:cacheprovider", "--dist", "worksteal"]
    command += ["--numprocesses", str(min(os.cpu_count() or 1, _MOST_PROCESSES))]
    wanted = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    with (folder / "tests.log").open("w", encoding="utf-8") as log:
        tests = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **wanted}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            code = tests.wait(seconds * (1 - _GRACE))
        except subprocess.TimeoutExpired:
            tests.send_signal(signal.SIGINT)  # pytest then still writes its record
            try:
                tests.wait(seconds * _GRACE / 2)
            except subprocess.TimeoutExpired:
                tests.kill()
            code = None
    results = (
        outcomes(record.read_text(encoding="utf-8")) if record.exists() else {"passed": 0, "failures": {}}
    )
    if code is None:
        results["error"] = f"not all tests had run after {seconds * (1 - _GRACE):.0f} s; see {log.name}"
    elif code > 1 or not results["passed"]:
        results["error"] = f"pytest exited with {code} and {results['passed']} tests passed; see {log.name}"
    return results


def outcomes(record: str) -> dict[str, Any]:
    """Return ``passed``, ``skipped`` and ``failures`` from pytest's record.

    Args:
        record: JUnit XML text.
    """
    passed, skipped = 0, 0
    failures: dict[str, str] = {}
    for case in ElementTree.fromstring(record).iter("testcase"):
        wrong = case.find("failure")
        wrong = case.find("error") if wrong is None else wrong
        if wrong is not None:
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            lines = (wrong.get("message") or "").strip().splitlines()
            failures[name] = lines[0][:300] if lines else "no message"
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failures": failures}
