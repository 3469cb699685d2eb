"""Cases made of parts, one process each, and helpers for their reports.

A part that fails, or leaves the device in a bad state, costs only its own figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Tell = Callable[[Any], None]
Part = Callable[[Path, bool, float, Tell], Any]
"""Function of a folder for files, ``quick``, the seconds available, and a callback for figures so far."""


def chosen(case: str, parts: Mapping[str, int], only: str | None) -> list[str]:
    """Return the requested parts.

    Args:
        case: case's name.
        parts: all parts.
        only: comma-separated names; all parts if None.

    Raises:
        SystemExit: unknown part.
    """
    names = list(parts) if only is None else only.split(",")
    if unknown := set(names) - set(parts):
        raise SystemExit(f"{case} has no part {', '.join(sorted(unknown))}; use {', '.join(parts)}")
    return names


def run(
    module: str,
    names: list[str],
    parts: Mapping[str, int],
    folder: Path,
    *,
    quick: bool,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the parts and return each part's figures.

    Args:
        module: module to run with ``python -m``; it calls :func:`serve`.
        names: names of the parts, in order.
        parts: guaranteed seconds of each part. Time that other parts leave is added.
        folder: existing folder for the parts' answers, logs and files.
        quick: tiny problems.
        seconds: time limit of all parts together.
        environment: additional environment variables of the processes.
    """
    started = time.monotonic()
    figures: dict[str, Any] = {}
    for number, name in enumerate(names):
        # Later parts keep their guaranteed seconds; this part gets all others.
        later = sum(parts[other] for other in names[number + 1 :])
        left = max(int(seconds - (time.monotonic() - started) - later), 1)
        figures[name] = _part(module, name, folder, quick, left, environment or {})
    return figures


def _part(
    module: str, name: str, folder: Path, quick: bool, seconds: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run a part; return its figures, the ``seconds`` that it took, and an ``error`` if it ended early."""
    print(f"{name}: at most {seconds} s", file=sys.stderr, flush=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", module, name, str(folder), str(int(quick)), str(seconds)]
    answers, messages = folder / f"{name}.jsonl", folder / f"{name}.log"
    started = time.monotonic()
    error = None
    with answers.open("w", encoding="utf-8") as out, messages.open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
                stdout=out,
                stderr=log,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            error = f"it was ended after {seconds} s"
        else:
            if done.returncode:
                last = [line for line in messages.read_text(encoding="utf-8").splitlines() if line.strip()]
                error = f"it exited with {done.returncode}: {''.join(last[-1:])}"
    # Each line holds all figures so far; the last one may be cut short.
    lines = [line for line in answers.read_text(encoding="utf-8").split("\n")[:-1] if line.startswith("{")]
    figures: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if error:
        figures["error"] = error
    return {**figures, "seconds": round(time.monotonic() - started, 1)}


def serve(parts: Mapping[str, Part], prepare: Callable[[], None] = lambda: None) -> None:
    """Run one part: ``python -m MODULE NAME FOLDER QUICK SECONDS``.

    Each line of its output is one JSON object with all figures so far. All other prints, including those from
    libraries, go to the log.

    Args:
        parts: parts by name.
        prepare: function called first.
    """
    name, folder, quick, seconds = sys.argv[1:]
    sys.stdout.flush()
    # Answers keep the real stdout; everything printed goes to stderr, the log.
    with open(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def tell(found: Any) -> None:
            print(json.dumps(found), file=answers, flush=True)

        prepare()
        tell(parts[name](Path(folder), quick == "1", float(seconds), tell))


def rows_of(found: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return a part's figures, without its own seconds and error."""
    return {name: row for name, row in found.get(part, {}).items() if isinstance(row, dict)}


def table(head: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    """Yield lines of a Markdown table, numbers on the right."""
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join(['---'] + ['---:'] * (len(head) - 1))} |"
    for row in rows:
        yield f"| {' | '.join(f'{cell:,.3g}' if isinstance(cell, float) else str(cell) for cell in row)} |"
