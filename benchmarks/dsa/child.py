"""One side of the comparison in a separate process: ``python -m benchmarks.dsa.child SIDE DTYPE SIZES``.

Every line on stdin starts a run, which prints one JSON object. Its keys are ``seconds``, ``cpu_seconds`` of
all threads (less sensitive to other processes), ``extra_bytes`` (the run's peak minus the level before it)
and ``threads``. The parent can therefore alternate between two sides.
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
    """Process of one side, which runs a step on request."""

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
        """Run one forward and backward; return the printed object.

        Raises:
            RuntimeError: the process failed, for example out of memory.
        """
        commands, answers = self._process.stdin, self._process.stdout
        assert commands is not None
        assert answers is not None
        # A process that has ended is noticed by its missing answer.
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
    """Run one side once in a fresh process; return the printed object.

    Raises:
        RuntimeError: the process failed.
    """
    with Child(side, sizes) as child:
        return child.run()


def serve(side: str, dtype: str, sizes: Sizes, commands: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield one result per command, all on the same inputs. Runs in a :class:`Child`'s process."""
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
    """Return freed memory to the system, reset the peak and return the resident bytes."""
    gc.collect()
    # The C library caches freed memory; without this the run would reuse the warm-up's memory uncounted.
    ctypes.CDLL(None).malloc_trim(0)
    # Writing 5 resets the peak, VmHWM.
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(field: str) -> int:
    """Return a memory figure of this process in bytes: ``VmRSS`` (resident now) or ``VmHWM`` (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only")


if __name__ == "__main__":
    side, dtype, sizes = sys.argv[1:]
    answers = sys.stdout
    # Keep output of the measured code apart from the answers.
    with contextlib.redirect_stdout(sys.stderr):
        for found in serve(side, dtype, Sizes(**json.loads(sizes)), sys.stdin):
            print(json.dumps(found), file=answers, flush=True)
