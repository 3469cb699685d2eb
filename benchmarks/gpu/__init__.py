"""All measurements that need a GPU, in one run of at most eight minutes with one report.

The parts are tests of the kernels on the device, variants of selection and backward, operators against the
model's bounds, training steps with and without fused DSA and other features, a trace, compute-sanitizer, and
attention of other projects. Every part is its own process: a part that fails, or leaves the device in a bad
state, costs only its own figures.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.gpu import beside, bounds, words
from benchmarks.registry import Metrics

PARTS = {
    "parity": 125,
    "selection": 40,
    "backward": 22,
    "operators": 45,
    "layer": 60,
    "streams": 14,
    "features": 75,
    "compiled": 25,
    "ranks": 20,
    "sanitizer": 45,
    "rivals": 6,
}
"""Guaranteed seconds of each part. Time that other parts leave is added.

Other projects' kernels come last: a device state that they break costs none of our figures.
"""
LIMIT = 480
"""Seconds of all parts together, the report included."""
_REPORT = 10


def run(device: str, quick: bool = False, report: str | None = None, only: str | None = None) -> Metrics:
    """Return all metrics of the case; ``failed`` has the failures by part.

    Args:
        device: device's name; without a GPU the case exits.
        quick: tiny problems and one test file.
        report: folder for ``report.md``, ``trace.json`` and the log of the tests; ``runs/gpu`` if None.
        only: comma-separated parts.
    """
    started = time.monotonic()
    if why := why_no_gpu() if device != "cuda" else why_no_kernels():
        raise SystemExit(why)
    names = parts.chosen("gpu", PARTS, only)
    folder = Path(report or "runs/gpu").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    left = LIMIT - _REPORT - (time.monotonic() - started)
    metrics = parts.run("benchmarks.gpu.part", names, PARTS, folder, quick=quick, seconds=left)
    metrics["slower_than_model"] = bounds.slower_than_model(metrics.get("operators", {}), _device_name())
    metrics["failed"] = failures(metrics)
    beside.draw(metrics.get("rivals", {}), folder / beside.PICTURE)
    (folder / "report.md").write_text(words.report(metrics, _device_name()), encoding="utf-8")
    print(f"report: {folder / 'report.md'}", file=sys.stderr, flush=True)
    return metrics


def why_no_gpu() -> str:
    """Return the reason why torch sees no GPU."""
    import torch

    if torch.version.cuda is None:
        return (
            f"gpu: torch {torch.__version__} was built without CUDA; install a build with it (pip's default "
            "index has one for Linux) into .venv, on a machine with an NVIDIA GPU"
        )
    return (
        f"gpu: torch {torch.__version__} sees no NVIDIA GPU; check the driver (nvidia-smi) and "
        "CUDA_VISIBLE_DEVICES"
    )


def why_no_kernels() -> str | None:
    """Return the reason why Triton cannot build its kernels' launcher, or None."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)
    if compiler is None:
        return "gpu: Triton compiles what launches its kernels, and there is no C compiler; install gcc"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    if not header.exists():
        return (
            f"gpu: Triton compiles what launches its kernels, and {header} is missing; install the headers "
            f"of this Python (on Debian and Ubuntu python{sys.version_info[0]}.{sys.version_info[1]}-dev)"
        )
    return None


def failures(found: dict[str, Any]) -> dict[str, str]:
    """Return failure messages by part, or by part and name within it."""
    failed = {name: found[name]["error"] for name in PARTS if "error" in found.get(name, {})}
    failed |= {f"parity, {test}": why for test, why in found.get("parity", {}).get("failures", {}).items()}
    if "refused" in found.get("sanitizer", {}):
        failed["sanitizer"] = found["sanitizer"]["refused"]
    for name in ("selection", "backward", "layer", "features", "streams", "compiled", "ranks"):
        for case, row in found.get(name, {}).items():
            if isinstance(row, dict) and "refused" in row:
                failed[f"{name}, {case}"] = row["refused"]
    return failed


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
