"""Jobs of several ranks, one process each, that print one JSON object on the first rank."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.parts import ROOT


def figures(
    module: str,
    words: Sequence[str],
    ranks: int,
    seconds: float,
    variables: Callable[[int], Mapping[str, str]] = lambda rank: {},
    telling: Sequence[str] = (),
) -> dict[str, Any] | str:
    """Return the first rank's last line, or the last line of a rank that failed.

    Args:
        module: module to run with ``python -m``.
        words: command line arguments.
        ranks: number of processes.
        seconds: time limit of all ranks.
        variables: function from a rank to additional environment variables.
        telling: parts of error messages that take precedence over others.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), **variables(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + seconds
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=max(1.0, deadline - time.monotonic())))
    except subprocess.TimeoutExpired:
        return f"their time was up after {seconds:.0f} s"
    finally:
        for process in processes:
            process.kill()
            with contextlib.suppress(ValueError):  # its pipes are closed already
                process.communicate()
    for process, (_, complaint) in zip(processes, said, strict=True):
        if process.returncode:
            lines = [line for line in complaint.splitlines() if line.strip()]
            first = [line for line in lines if any(words in line for words in telling)]
            return (first or lines or ["no message"])[-1][:300]
    found: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return found
