"""One side of the comparison in a separate process: ``python -m benchmarks.dsa.child SIDE RUNS SIZES``.

The process prints one JSON object: ``seconds`` of every run, ``cpu_seconds`` of all its threads (less
sensitive to other processes on the machine), ``extra_bytes``, the peak of the first run minus the level
before it, and the number of ``threads``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.dsa.problem import Sizes, fused_step, make_inputs, megatron_step

SIDES = {"fused": fused_step, "megatron": megatron_step}


def measure(side: str, runs: int, sizes: Sizes) -> dict[str, Any]:
    """Run one side in a fresh process and return what it printed.

    Raises:
        RuntimeError: it failed, for example for lack of memory.
    """
    root = Path(__file__).parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.dsa.child", side, str(runs), json.dumps(asdict(sizes))],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{side} at {sizes} exited with {done.returncode}; its messages are above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_here(side: str, runs: int, sizes: Sizes) -> dict[str, Any]:
    """Entry point of the process that :func:`measure` starts."""
    import torch

    step = SIDES[side]
    # Warm-up: libraries load, threads start and kernels are generated before the measurement.
    small = replace(sizes, length=min(sizes.length, 256))
    step(*make_inputs(small), small)
    inputs, grad_out = make_inputs(sizes)
    before = _level()
    seconds, cpu_seconds = [], []
    extra = 0
    for number in range(runs):
        started, cpu_started = time.perf_counter(), time.process_time()
        result = step(inputs, grad_out, sizes)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        if number == 0:
            extra = memory("VmHWM") - before
        del result
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "extra_bytes": extra,
        "threads": torch.get_num_threads(),
    }


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
    side, runs, sizes = sys.argv[1:]
    print(json.dumps(run_here(side, int(runs), Sizes(**json.loads(sizes)))))
