"""All that needs a GPU, in one go of at most eight minutes, and one report of it.

Tests of the kernels on the device, the operators beside other projects' and beside the model's bounds, whole
training steps with and without fused DSA and other features, and a trace. Every part is a process of its own:
one that fails, or leaves the device in a bad state, costs its own figures only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import bounds, words
from benchmarks.registry import Metrics

ROOT = Path(__file__).parents[2]
PARTS = {"parity": 185, "operators": 95, "layer": 100, "features": 100}
"""Seconds that each may take: eight minutes together."""


def run(device: str, quick: bool = False, report: str | None = None, only: str | None = None) -> Metrics:
    """All metrics of the case; ``failed`` names what went wrong, part by part.

    Args:
        device: where; without a GPU there is nothing to do.
        quick: tiny problems and one test file.
        report: folder for ``report.md``, ``trace.json`` and the log of the tests; ``runs/gpu`` if None.
        only: parts, with commas between them.
    """
    if device != "cuda":
        raise SystemExit(why_no_gpu())
    names = list(PARTS) if only is None else only.split(",")
    if unknown := set(names) - set(PARTS):
        raise SystemExit(f"gpu has no part {', '.join(sorted(unknown))}; use {', '.join(PARTS)}")
    folder = Path(report or "runs/gpu").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {name: part(name, folder, quick) for name in names}
    found["slower_than_model"] = bounds.slower_than_model(found.get("operators", {}), _device_name())
    found["failed"] = failures(found)
    (folder / "report.md").write_text(words.report(found, _device_name()), encoding="utf-8")
    print(f"report: {folder / 'report.md'}", file=sys.stderr, flush=True)
    return found


def why_no_gpu() -> str:
    """A sentence for a machine on which torch sees no GPU."""
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


def part(name: str, folder: Path, quick: bool) -> dict[str, Any]:
    """What a part found, with the ``seconds`` that it took; ``error`` says why there is not more."""
    print(f"{name}: at most {PARTS[name]} s", file=sys.stderr, flush=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "benchmarks.gpu.part", name, str(folder), str(int(quick))]
    answers, messages = folder / f"{name}.jsonl", folder / f"{name}.log"
    started = time.monotonic()
    error = None
    with answers.open("w", encoding="utf-8") as out, messages.open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                [*command, str(PARTS[name])],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdout=out,
                stderr=log,
                timeout=PARTS[name],
                check=False,
            )
        except subprocess.TimeoutExpired:
            error = f"it was ended after {PARTS[name]} s"
        else:
            if done.returncode:
                last = [line for line in messages.read_text(encoding="utf-8").splitlines() if line.strip()]
                error = f"it exited with {done.returncode}: {''.join(last[-1:])}"
    # Each line holds all that was found until then; the last one may be cut short.
    lines = [line for line in answers.read_text(encoding="utf-8").split("\n")[:-1] if line]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if error:
        found["error"] = error
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def failures(found: dict[str, Any]) -> dict[str, str]:
    """By part, or by part and name within it: what went wrong."""
    failed = {name: found[name]["error"] for name in PARTS if "error" in found.get(name, {})}
    failed |= {f"parity, {test}": why for test, why in found.get("parity", {}).get("failures", {}).items()}
    for name in ("layer", "features"):
        for case, row in found.get(name, {}).items():
            if isinstance(row, dict) and "refused" in row:
                failed[f"{name}, {case}"] = row["refused"]
    return failed


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
