"""Job in a separate process that its parent controls, so that two jobs can alternate.

``python -m benchmarks.memory.child SIZES SWITCHES DEVICE`` reads commands from stdin, one per line, and
answers each of them with one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.memory.job import Job, Sizes

ANSWER = "answer:"


class Child:
    """Parent's side of a job; a context manager that terminates the process."""

    def __init__(
        self,
        name: str,
        sizes: Any,
        switches: Mapping[str, Any],
        device: str,
        module: str = __spec__.name,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process.

        Args:
            name: job's name for messages.
            sizes: dataclass of sizes.
            switches: arguments of ``mindspeed_dsa.enable``.
            device: device to run on.
            module: module whose ``main`` serves commands.
            environment: additional environment variables of this job.
        """
        root = Path(__file__).parents[2]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(asdict(sizes)), json.dumps(switches), device],
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *unused: Any) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return the answer.

        Raises:
            RuntimeError: the job exited instead.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # Megatron prints to stdout
            if line.startswith(ANSWER):
                found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return found
        raise RuntimeError(f"{self.name}: the job exited at {command!r}; its messages are above")


def timed(step: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run a step; return its figures, and its seconds of wall-clock and CPU time."""
    started, cpu_started = time.perf_counter(), time.process_time()
    found = step()
    return {
        **found,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
    }


COMMANDS = {
    "step": lambda job: timed(job.step),
    "long step": lambda job: timed(job.long_step),
    "parameters": lambda job: {"parameters": job.parameters},
    "rest": lambda job: {"bytes": job.state_bytes()},
    "update peak": lambda job: {"bytes": job.update_peak()},
    "activation peak": lambda job: {"bytes": job.activation_peak()},
    "copied": lambda job: {"bytes": job.copied()},
    "digest": lambda job: {"sha256": job.digest()},
}


def serve(job: Any, commands: Mapping[str, Callable[[Any], dict[str, Any]]]) -> None:
    """Answer commands until stdin ends."""
    for line in sys.stdin:
        print(ANSWER + json.dumps(commands[line.strip()](job)), flush=True)


def main(sizes: str, switches: str, device: str) -> None:
    """Serve the commands of this case's job."""
    serve(Job(Sizes(**json.loads(sizes)), {**json.loads(switches), "mindspeed_platform": device}), COMMANDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
