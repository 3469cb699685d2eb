"""Parts of ``gpu``, one in a process: see :func:`benchmarks.parts.serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.parts import Tell


def operators(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Return the figures of ``dsa`` on the device."""
    from benchmarks.dsa import cuda

    return cuda.run((4096,), (16,), rounds=3, tell=tell) if quick else cuda.run(tell=tell)


def parity(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Run the kernels' tests, compiled and on the device."""
    from benchmarks.gpu import parity as tests

    return tests.run(folder, quick, seconds)


def selection(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Time scores and selection, in slabs of two sizes, in bf16 and FP8."""
    from benchmarks.gpu import selection as ways

    return ways.run(quick, tell)


def backward(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Time attention's backward by rows and by tiles of keys."""
    from benchmarks.gpu import backward as ways

    return ways.run(quick, tell)


def layer(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Run training steps, fused and stock, and trace one."""
    from benchmarks.gpu import layer as steps

    return steps.run(folder, quick, tell)


def features(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Run training steps with and without each feature that works without compiling Megatron's code."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # fixed order of sums in cuBLAS
    from benchmarks.gpu import features as steps

    return steps.run(quick, tell)


def compiled(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Run training steps with and without compiled regions."""
    from benchmarks.gpu import features as steps

    return steps.run(quick, tell, cases=steps.COMPILED)


def ranks(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Run training steps of two context parallel ranks on one GPU, and of one rank."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from benchmarks.gpu import ranks as steps

    return steps.run(quick, seconds, tell)


def streams(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Time a layer's work on one stream and on two."""
    from benchmarks.gpu import streams as beside

    return beside.run(quick, tell)


def sanitizer(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Run the kernels under compute-sanitizer."""
    from benchmarks.gpu import sanitizer as checked

    return checked.run(folder, seconds)


def rivals(folder: Path, quick: bool, seconds: float, tell: Tell) -> Any:
    """Time attention and other projects' attention."""
    from benchmarks.gpu import rivals as beside

    return beside.run(quick, seconds, tell)


if __name__ == "__main__":
    all_parts = (
        *(parity, selection, backward, operators, layer, streams, features),
        *(compiled, ranks, sanitizer, rivals),
    )
    parts.serve({part.__name__: part for part in all_parts})
