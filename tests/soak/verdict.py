"""Checks of a job: its ranks' output, the steps from which it resumed, and its results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindspeed_dsa.tools.hang.waits import BROKEN, WORKER_ENDED
from tests.soak.attempt import Failure, Printed, records, steps_in
from tests.soak.damage import folder_of
from tests.soak.layouts import STEPS

_TRACEBACK = "Traceback (most recent call last)"
_FIGURES = ("step", "lm_loss", "indexer_loss", "grad_norm")
_RESUMED = re.compile(r"^resuming the unfinished run in .* from step (\d+)$", re.MULTILINE)
_PASSED = re.compile(r"^checkpoint: .* passed over: (.*)$", re.MULTILINE)


def check_printed(printed: Sequence[Printed]) -> None:
    """Refuse tracebacks, except about connections that a killed rank has broken.

    Raises:
        Failure: a rank has printed another traceback.
    """
    for output in printed:
        for trace in output.text.split(_TRACEBACK)[1:]:
            if any(word in trace.lower() for word in (*BROKEN, WORKER_ENDED)):
                continue
            last = trace.strip().splitlines()[-1]
            raise Failure(f"rank {output.rank} printed a traceback in start {output.start}: {last[:200]}")


def check_said(printed: Sequence[Printed], patterns: Sequence[str]) -> None:
    """Check that the ranks have printed all expected patterns.

    Raises:
        Failure: no rank has printed one of them.
    """
    for pattern in patterns:
        if not any(re.search(pattern, each.text) for each in printed):
            raise Failure(f"no rank said {pattern!r}")


def check_resumed(printed: Sequence[Printed], floors: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Check that each start resumed from an existing checkpoint.

    Args:
        printed: output of the ranks of one attempt.
        floors: newest whole checkpoint before each start; the last value also holds for later starts.

    Yields:
        The step from which a start resumed, and its last step, for each start that made a step.

    Raises:
        Failure: a start began anew, or from an older checkpoint.
    """
    for output in printed:
        if output.rank:
            continue
        floor = floors[min(output.start, len(floors) - 1)]
        if floor is not None and "new run in " in output.text:
            raise Failure(f"start {output.start} began anew where there was a checkpoint of step {floor}")
        resumed = _RESUMED.search(output.text)
        steps = steps_in(output.text)
        begun = min(steps) - 1 if steps else int(resumed[1]) if resumed else None
        if begun is not None and begun < (floor or 0):
            raise Failure(
                f"start {output.start} went on from step {begun}, and there was one of step {floor}"
            )
        if steps:
            yield min(steps) - 1, max(steps)


def passed_over(printed: Sequence[Printed]) -> tuple[str, Counter[str]]:
    """Return the messages about skipped checkpoints, and the count of each reason."""
    lines = [line for each in printed for line in _PASSED.findall(each.text)]
    reasons: Counter[str] = Counter()
    for line in lines:
        for reason in line.split("; "):
            reason = re.sub(r"^iter_\d+: ", "", reason)
            reason = re.sub(r"^\S+\.(distcp|pt|metadata)|^\.metadata", "FILE", reason)
            reasons[re.sub(r"\d+", "N", reason)] += 1
    return "\n".join(lines), reasons


def check_results(run: Path, unbroken: Path) -> None:
    """Compare a finished run with the unbroken one, bitwise: figures of all steps, final tensors.

    Raises:
        Failure: they differ, or something half written is left.
    """
    for name, figures in (("metrics.jsonl", _FIGURES), ("heldout.jsonl", ("step", "heldout_loss"))):
        mine, theirs = (
            [tuple(each[key] for key in figures) for each in records(of, name)] for of in (run, unbroken)
        )
        for ours, other in zip(mine, theirs, strict=False):
            if ours != other:
                raise Failure(f"{name} differs from the unbroken run's: {ours} and {other}")
        if len(mine) != len(theirs):
            raise Failure(f"{name} has {len(mine)} records, the unbroken run's {len(theirs)}")
    last, expected = (folder_of(of / "checkpoints", STEPS) for of in (run, unbroken))
    names = sorted(path.name for path in expected.glob("*.distcp"))
    if not names or names != sorted(path.name for path in last.glob("*.distcp")):
        raise Failure(f"{last.name} has other files than the unbroken run's: {names}")
    for name in names:
        if (last / name).read_bytes() != (expected / name).read_bytes():
            raise Failure(f"{name} of {last.name}, weights and optimizer, differs from the unbroken run's")
    if left := sorted(path.name for path in last.parent.glob(".iter_*")):
        raise Failure(f"{left} is left half written")
