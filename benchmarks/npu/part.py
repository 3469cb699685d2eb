"""Parts of ``npu``, one in a process: see :func:`benchmarks.parts.serve`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.npu import stand_ins
from benchmarks.parts import Part, Tell


def machine(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Return versions, limits, environment, and operators that cannot be called."""
    from benchmarks.npu import machine as facts

    return facts.run()


def operators(part: str, folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Compare operators with their references."""
    from benchmarks.npu import operators as problems

    return problems.run(part, quick, tell)


def layer(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Run training steps, fused and stock."""
    from benchmarks.npu import steps

    return steps.layers(quick, tell)


def memory(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Run training steps without and with each feature."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from benchmarks.npu import steps

    return steps.memory(quick, tell)


def ranks(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Run collectives, and training steps of several ranks."""
    from benchmarks.npu import ranks as several

    return several.run(quick, seconds, tell)


def profile(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Return a fused step's time on the device by kind of operator."""
    from benchmarks.npu import steps

    return steps.profiled(folder, quick)


def by_name() -> dict[str, Part]:
    """Return all parts by name."""
    from benchmarks.npu import OPERATOR_PARTS

    others: tuple[Part, ...] = (machine, layer, memory, ranks, profile)
    return {f.__name__: f for f in others} | {name: partial(operators, name) for name in OPERATOR_PARTS}


def prepare() -> None:
    """Make the device, or its stand-in, the current platform."""
    from mindspeed_dsa import platforms

    if os.environ.get(stand_ins.ASKED_FOR):
        stand_ins.install()
    platforms.prepare(platforms.detect("npu"))


if __name__ == "__main__":
    parts.serve(by_name(), prepare)
