"""``doctor --device``: train, save and resume a small model on the device; one line per stage."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa import platforms
from mindspeed_dsa.tools.compare import job

LIMIT = 600.0
"""Seconds until the device test is stopped; long enough to compile operators."""
_COMMAND = (sys.executable, "-m", "mindspeed_dsa.tools.trial.device")


def examine(platform: str) -> list[dict[str, Any]]:
    """Run the device test in a subprocess, because a failing device may kill the process.

    Args:
        platform: platform's name; any other text means that none was detected.

    Returns:
        One dict per stage, with its duration ``seconds`` or a one-line ``error``.
    """
    if platform not in platforms.PLATFORMS:
        return [{"stage": "start", "error": "there is no platform to train on"}]
    with tempfile.TemporaryDirectory(prefix="mindspeed_dsa-") as folder:
        log = Path(folder) / "log"
        with _started(platform, log) as (process, late):
            results, begun = _answers(process)
            code = process.wait()
        if begun and late.is_set():
            results.append({"stage": begun, "error": f"it did not end within {LIMIT:g} s"})
        elif begun or code:
            last = "".join(job.last_lines(log, 1)).strip() or "it said nothing"
            results.append({"stage": begun or "start", "error": f"the process ended with {code}: {last}"})
    return results


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield one line of the report per stage, with failures marked."""
    for stage in found:
        if "error" in stage:
            yield f"  FAILED: {stage['stage']}: {stage['error']}"
            continue
        used = f" on {', '.join(stage['operators'])}" if stage.get("operators") else ""
        yield f"  {stage['stage']}: {stage['seconds']} s{used}"


def _answers(process: subprocess.Popen[bytes]) -> tuple[list[dict[str, Any]], str]:
    """Read the process's output; return its results, and the stage that it was in when it ended."""
    results: list[dict[str, Any]] = []
    begun = ""
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError):  # a library's own print between the JSON lines
            said = json.loads(line)
            begun = said.get("begins", "")
            results += [said] if "stage" in said else []
    return results, begun


@contextlib.contextmanager
def _started(platform: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], threading.Event]]:
    late = threading.Event()
    environment = job.child_environment({"OMP_WAIT_POLICY": "passive"})
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [*_COMMAND, platform],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        # Popen has no timeout for reading a pipe, so a timer ends the process.
        def end() -> None:
            late.set()
            job.stop(process)

        timer = threading.Timer(LIMIT, end)
        timer.start()
        try:
            yield process, late
        finally:
            timer.cancel()
            job.stop(process)
