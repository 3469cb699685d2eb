"""``doctor --device``: a small model trained, saved and resumed on a device, one line a failure."""

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
"""Seconds until a device that does not answer is given up; operators are compiled in some of them."""
_COMMAND = (sys.executable, "-m", "mindspeed_dsa.tools.trial.device")


def examine(platform: str) -> list[dict[str, Any]]:
    """Try the device in a process of its own, which it may take down.

    Args:
        platform: its name; another word where none was found.

    Returns:
        Each stage with its ``seconds``, or with an ``error`` of one line.
    """
    if platform not in platforms.PLATFORMS:
        return [{"stage": "start", "error": "there is no platform to train on"}]
    with tempfile.TemporaryDirectory(prefix="mindspeed_dsa-") as folder:
        log = Path(folder) / "log"
        with _started(platform, log) as (process, late):
            found, begun = _answers(process)
            code = process.wait()
        if begun and late.is_set():
            found.append({"stage": begun, "error": f"it did not end within {LIMIT:g} s"})
        elif begun or code:
            last = "".join(job.last_lines(log, 1)).strip() or "it said nothing"
            found.append({"stage": begun or "start", "error": f"the process ended with {code}: {last}"})
    return found


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report, failures marked."""
    for each in found:
        if "error" in each:
            yield f"  FAILED: {each['stage']}: {each['error']}"
            continue
        used = f" on {', '.join(each['operators'])}" if each.get("operators") else ""
        yield f"  {each['stage']}: {each['seconds']} s{used}"


def _answers(process: subprocess.Popen[bytes]) -> tuple[list[dict[str, Any]], str]:
    """Return what was answered, and the stage that was begun and never was."""
    found: list[dict[str, Any]] = []
    begun = ""
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            begun = said.get("begins", "")
            found += [said] if "stage" in said else []
    return found, begun


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
