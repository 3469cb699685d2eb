"""One part in a process of its own: ``python -m benchmarks.gpu.part NAME FOLDER QUICK SECONDS``.

Each line of its output is one JSON object, of all that was found until then.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tell = Callable[[Any], None]


def operators(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """The figures of ``dsa`` on the device."""
    from benchmarks.dsa import cuda

    return cuda.run((4096,), (16,), rounds=3, tell=tell) if quick else cuda.run(tell=tell)


def parity(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Tests of the kernels, compiled and on the device."""
    from benchmarks.gpu import parity as tests

    return tests.run(folder, quick, seconds)


def layer(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Training steps, fused and stock, and a trace."""
    from benchmarks.gpu import layer as steps

    return steps.run(folder, quick, tell)


def features(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Training steps without and with each feature, whose results need no compilation of Megatron's code."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # its sums in a fixed order
    from benchmarks.gpu import features as steps

    return steps.run(quick, tell)


if __name__ == "__main__":
    name, folder, quick, seconds = sys.argv[1:]
    answers = sys.stdout

    def tell(found: Any) -> None:
        """Write a line."""
        print(json.dumps(found), file=answers, flush=True)

    # What Megatron prints goes to the log.
    with contextlib.redirect_stdout(sys.stderr):
        run = {f.__name__: f for f in (operators, parity, layer, features)}[name]
        tell(run(Path(folder), quick == "1", float(seconds), tell))
