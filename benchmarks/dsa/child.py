"""One side of the comparison in a separate process: ``python -m benchmarks.dsa.child SIDE DTYPE SIZES``.

Every line on its input starts a run, after which it prints one JSON object: ``seconds``, ``cpu_seconds`` of
all its threads (less sensitive to other processes on the machine), ``extra_bytes``, the peak of the run minus
the level before it, and the number of ``threads``. So two sides can take turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.dsa.problem import Sizes, fused_step, make_inputs, megatron_step

SIDES = {"fused": fused_step, "megatron": megatron_step}


class Child:
    """A side's process, which runs a step whenever it is told to."""

    def __init__(self, side: str, sizes: Sizes, dtype: str = "float32") -> None:
        root = Path(__file__).parents[2]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._what = f"{side} at {sizes} in {dtype}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.dsa.child", side, dtype, json.dumps(asdict(sizes))],
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self) -> dict[str, Any]:
        """One forward and backward: what the process printed.

        Raises:
            RuntimeError: it failed, for example for lack of memory.
        """
        commands, answers = self._process.stdin, self._process.stdout
        assert commands is not None
        assert answers is not None
        with contextlib.suppress(BrokenPipeError):
            commands.write("run\n")
            commands.flush()
        line = answers.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"{self._what} exited with {code}; its messages are above")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def measure(side: str, sizes: Sizes) -> dict[str, Any]:
    """Run one side once in a fresh process and return what it printed.

    Raises:
        RuntimeError: it failed.
    """
    with Child(side, sizes) as child:
        return child.run()


def serve(side: str, dtype: str, sizes: Sizes, commands: Iterable[str]) -> Iterator[dict[str, Any]]:
    """In the process of a :class:`Child`: one run per command, all on the same inputs."""
    import torch

    step = SIDES[side]
    # Warm-up: libraries load, threads start and kernels are generated before the measurement.
    small = replace(sizes, length=min(sizes.length, 256))
    step(*make_inputs(small, getattr(torch, dtype)), small)
    inputs, grad_out = make_inputs(sizes, getattr(torch, dtype))
    for _ in commands:
        before = _level()
        started, cpu_started = time.perf_counter(), time.process_time()
        result = step(inputs, grad_out, sizes)
        yield {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu_started,
            "extra_bytes": memory("VmHWM") - before,
            "threads": torch.get_num_threads(),
        }
        del result


def _level() -> int:
    """Resident bytes; freed memory is returned first, and the peak is reset."""
    gc.collect()
    # The C library caches freed memory; without this the run would reuse the warm-up's memory uncounted.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(field: str) -> int:
    """A figure of this process in bytes: ``VmRSS``, resident now, or ``VmHWM``, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only")


if __name__ == "__main__":
    side, dtype, sizes = sys.argv[1:]
    answers = sys.stdout
    # What the measured code prints is no answer.
    with contextlib.redirect_stdout(sys.stderr):
        for found in serve(side, dtype, Sizes(**json.loads(sizes)), sys.stdin):
            print(json.dumps(found), file=answers, flush=True)
