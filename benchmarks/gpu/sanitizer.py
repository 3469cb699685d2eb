"""Kernels under compute-sanitizer, if it is installed: small problems, wrong accesses by kernel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.dsa.floor import operator_calls
from benchmarks.dsa.problem import Sizes
from benchmarks.gpu.backward import ROWS, TILES
from benchmarks.parts import ROOT
from mindspeed_dsa.ops.grouped_matmul import grouped_matmul
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.quantised_indexer import quantised_indexer
from mindspeed_dsa.ops.sparse_flash_attention import hopper

TOOL = "compute-sanitizer"
HEADS = (64, 16, 128)
"""Numbers of heads that reach both of Hopper's forward kernels, and two programs for a row."""
_SIZES = {"index_heads": 64, "topk": 256}
_ROWS = 640
_BEGUN = "called: "
# Check accesses only: Triton's loader asks the driver for an attribute that not every kernel can have, and
# continues when refused. The tool would count one error for each kernel.
_MEMCHECK = ("--tool", "memcheck", "--report-api-errors", "no")


def run(folder: Path, seconds: float) -> dict[str, Any]:
    """Run :func:`calls` under the tool.

    Args:
        folder: folder for the tool's output ``sanitizer.txt``.
        seconds: time limit.

    Returns:
        ``errors``, their number; ``kernels``, their number by kernel; ``calls``, the calls made. Without the
        tool only ``absent``, a sentence.
    """
    tool = shutil.which(TOOL)
    if tool is None:
        return {"absent": f"{TOOL} is not on PATH: no access was checked"}
    output = folder / "sanitizer.txt"
    command = [tool, *_MEMCHECK, "--log-file", str(output), sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=seconds, capture_output=True, text=True, check=False)
        ended, printed = f"it exited with {done.returncode}: {done.stderr.strip()[-200:]}", done.stdout
    except subprocess.TimeoutExpired as error:
        ended = f"its time was up after {seconds:.0f} s"
        printed = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else (error.stdout or "")
    result = summary(output.read_text(encoding="utf-8") if output.exists() else "")
    result["calls"] = [line[len(_BEGUN) :] for line in printed.splitlines() if line.startswith(_BEGUN)]
    if result["errors"] is None:
        result["error"] = f"{TOOL} did not come to its summary: {ended}"
    elif result["errors"]:
        result["refused"] = (
            f"{result['errors']} wrong accesses, in {', '.join(result['kernels']) or 'no kernel'}"
        )
    return result


def summary(log: str) -> dict[str, Any]:
    """Return the log's number of ``errors``, None without a summary, and their number by kernel."""
    last = re.findall(r"ERROR SUMMARY: (\d+) error", log)
    return {
        "errors": int(last[-1]) if last else None,
        "kernels": dict(Counter(re.findall(r"^=+\s+at (?:0x\S+ in )?(\w+)", log, re.MULTILINE))),
    }


def calls(device: str, rows: int = _ROWS) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield names, and functions that launch each operator's kernels once.

    Args:
        device: device to run on.
        rows: rows of a sequence; not a multiple of a tile.
    """
    for heads in HEADS:
        sizes = Sizes(length=rows, heads=heads, **_SIZES)
        for operator, directions in operator_calls(sizes, torch.bfloat16, device, "triton").items():
            for direction, call in directions.items():
                if (operator, direction) != ("sparse_flash_attention", "backward"):
                    yield f"{operator} {direction}, {heads} heads", call
                    continue
                for way, deterministic in product((TILES, ROWS), (False, True)):
                    words = f"{way}, in a fixed order" if deterministic else way
                    yield f"{operator} {direction} {words}, {heads} heads", _in_way(call, way, deterministic)
    # A single row is a window of its own, and Triton compiles arguments that are 1 separately.
    single = operator_calls(Sizes(length=1, heads=64, **_SIZES), torch.bfloat16, device, "triton")
    one_row = single["sparse_flash_attention"]["backward"]
    yield "sparse_flash_attention backward, one row", _in_way(one_row, TILES, deterministic=False)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    operands = drawn(1, rows, 64, 128), drawn(1, rows, 128), drawn(1, rows, 64)
    for name, operator in (("bf16", lightning_indexer), ("fp8", quantised_indexer)):
        yield f"selection, {name}", partial(operator, *operands, _SIZES["topk"], backend="triton")
    yield "grouped product of one row", partial(grouped_matmul, drawn(1, 64), drawn(3, 64, 128), [0, 1, 0])


def _in_way(backward: Callable[[], object], way: str, deterministic: bool) -> Callable[[], object]:
    """Return a function that calls the backward by rows, or by tiles that rows share."""

    def call() -> object:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(deterministic)
        try:
            with mock.patch.object(hopper, "prefers_rows", return_value=way == ROWS):
                return backward()
        finally:
            torch.use_deterministic_algorithms(before)

    return call


def main() -> None:
    """Make all calls, and print each name before its call."""
    for name, call in calls("cuda"):
        print(f"{_BEGUN}{name}", flush=True)
        call()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
