"""The quick tests under the conditions of other processors: ``make test-processors``.

Libraries choose their code by the processor's features; environment variables make them use fewer. A row of
:data:`PROCESSORS` stands for one processor. Rows that need more than this machine has are skipped by name.
Rows also differ in the number of threads and in the results of measurements (``tests/support/stand_in.py``).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LEAST = 4
"""Number of rows that must run on an x86 processor of the last ten years."""


@dataclass(frozen=True)
class Processor:
    """A processor that the environment of a test run simulates.

    Attributes:
        needs: flags of ``/proc/cpuinfo`` that the row requires.
        environ: environment variables of the run.
    """

    needs: Sequence[str]
    environ: dict[str, str] = field(default_factory=dict)

    def missing(self, flags: set[str]) -> list[str]:
        """Return the required flags that this machine's processor lacks."""
        return [flag for flag in self.needs if flag not in flags]


def _threads(number: int) -> dict[str, str]:
    # MKL would use no more threads than the machine has cores.
    return {"OMP_NUM_THREADS": str(number), "MKL_DYNAMIC": "FALSE"}


def _isa(aten: str, onednn: str, mkl: str) -> dict[str, str]:
    return {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
PROCESSORS = {
    "plain": Processor(
        ["avx2"],
        _threads(1) | _isa("default", "AVX2", "AVX2") | {"TEST_MKL": "slow", "TEST_MEASURED": "first"},
    ),
    "avx2-four-threads": Processor(
        ["avx2"], _threads(4) | _isa("avx2", "AVX2", "AVX2") | {"TEST_MKL": "slow", "TEST_MEASURED": "last"}
    ),
    "avx2": Processor(
        ["avx2"], _threads(2) | _isa("avx2", "AVX2", "AVX2") | {"TEST_MKL": "fast", "TEST_MEASURED": "first"}
    ),
    "avx512": Processor(
        _AVX512,
        _threads(2) | _isa("avx512", "AVX512_CORE", "AVX512") | {"TEST_MKL": "fast", "TEST_MEASURED": "last"},
    ),
    "avx512-bf16": Processor(
        (*_AVX512, "avx512_bf16"),
        _threads(2) | _isa("avx512", "AVX512_CORE_BF16", "AVX512") | {"TEST_MKL": "slow"},
    ),
    "amx": Processor(
        (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
        _threads(2) | _isa("avx512", "AVX512_CORE_AMX", "AVX512") | {"TEST_MEASURED": "last"},
    ),
    "as-it-is": Processor([], _threads(2)),
}
"""Ordered by width: the last row that a machine supports is its widest."""


def flags_of_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the flags of this machine's processor, or none if they are unknown."""
    try:
        match = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return set()
    return set(match[1].split()) if match else set()


def available(flags: set[str]) -> dict[str, Processor]:
    """Return the rows that a processor with these flags can stand for."""
    return {name: row for name, row in PROCESSORS.items() if not row.missing(flags)}


def main(words: Sequence[str] | None = None) -> int:
    """Run pytest once for each row; return 1 if a run failed or too few rows could run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of rows with commas between; 'widest' is the last")
    args, pytest_words = parser.parse_known_args(words)
    flags = flags_of_processor()
    rows = available(flags)
    for name, row in PROCESSORS.items():
        if name not in rows:
            print(f"{name}: skipped, this processor lacks {', '.join(row.missing(flags))}", flush=True)
    status = 0
    if platform.machine() == "x86_64" and len(rows) < LEAST:
        print(f"{len(rows)} rows can run here, and {LEAST} have to", flush=True)
        status = 1
    if args.only:
        widest = ([name for name in rows if name != "as-it-is"] or ["as-it-is"])[-1]
        names = args.only.replace("widest", widest).split(",")
        if unknown := set(names) - set(PROCESSORS):
            parser.error(
                f"no rows are called {', '.join(unknown)}; choose from {', '.join(PROCESSORS)}, widest"
            )
        rows = {name: rows[name] for name in names if name in rows}
        if not rows:
            print(f"none of {', '.join(names)} can run here", flush=True)
            status = 1
    results = []
    for name, row in rows.items():
        print(f"{name}: {' '.join(f'{k}={v}' for k, v in row.environ.items())}", flush=True)
        start = time.monotonic()
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "not full", *pytest_words],
            env={**os.environ, **row.environ},
            check=False,
        )
        results.append(
            f"{name}: {'passed' if run.returncode == 0 else 'FAILED'}, {time.monotonic() - start:.0f} s"
        )
        status = status or run.returncode
    print("\n".join(results), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
