"""Cases made of parts, each a process of its own, and what their reports share.

A part that fails, or leaves the device in a bad state, costs its own figures only.
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
"""Folder for files, whether to be quick, the seconds that there are, and what to call with figures so far."""


def chosen(case: str, parts: Mapping[str, int], only: str | None) -> list[str]:
    """The parts that are wanted.

    Args:
        case: its name.
        parts: all there are.
        only: names with commas between; all of them if None.

    Raises:
        SystemExit: there is no such part.
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
    """Run the parts and return what each found.

    Args:
        module: run with ``python -m``; calls :func:`serve`.
        names: of the parts, in order.
        parts: seconds that each has for certain. What others leave, or did not ask for, is added.
        folder: for the parts' answers, logs and files; must exist.
        quick: tiny problems.
        seconds: that all of them may take.
        environment: of the processes, added to this one's.
    """
    started = time.monotonic()
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
        later = sum(parts[other] for other in names[number + 1 :])
        left = max(int(seconds - (time.monotonic() - started) - later), 1)
        found[name] = _part(module, name, folder, quick, left, environment or {})
    return found


def _part(
    module: str, name: str, folder: Path, quick: bool, seconds: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run a part: what it found, the ``seconds`` that it took, and an ``error`` if there is not more."""
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
    # Each line holds all that was found until then; the last one may be cut short.
    lines = [line for line in answers.read_text(encoding="utf-8").split("\n")[:-1] if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if error:
        found["error"] = error
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def serve(parts: Mapping[str, Part], prepare: Callable[[], None] = lambda: None) -> None:
    """Run one part: ``python -m MODULE NAME FOLDER QUICK SECONDS``.

    Each line of its output is one JSON object, of all that was found until then. What else is printed, by
    libraries too, goes to the log.

    Args:
        parts: by name.
        prepare: called first.
    """
    name, folder, quick, seconds = sys.argv[1:]
    sys.stdout.flush()
    with open(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def tell(found: Any) -> None:
            print(json.dumps(found), file=answers, flush=True)

        prepare()
        tell(parts[name](Path(folder), quick == "1", float(seconds), tell))


def rows_of(found: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return what a part found, without its own seconds and error."""
    return {name: row for name, row in found.get(part, {}).items() if isinstance(row, dict)}


def table(head: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    """Lines of a Markdown table, numbers on the right."""
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join(['---'] + ['---:'] * (len(head) - 1))} |"
    for row in rows:
        yield f"| {' | '.join(f'{cell:,.3g}' if isinstance(cell, float) else str(cell) for cell in row)} |"
