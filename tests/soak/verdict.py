"""What is held against a job: what its ranks have printed, where it went on, what it ended with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindspeed_dsa.tools.hang.waits import BROKEN
from tests.soak.attempt import Failure, Printed, records, steps_in
from tests.soak.damage import folder_of
from tests.soak.layouts import STEPS

_TRACEBACK = "Traceback (most recent call last)"
_FIGURES = ("step", "lm_loss", "indexer_loss", "grad_norm")
_RESUMED = re.compile(r"^resuming the unfinished run in .* from step (\d+)$", re.MULTILINE)
_PASSED = re.compile(r"^checkpoint: .* passed over: (.*)$", re.MULTILINE)


def check_printed(printed: Sequence[Printed]) -> None:
    """Refuse tracebacks, but of connections that a rank which was killed has broken.

    Raises:
        Failure: a rank has printed one.
    """
    for each in printed:
        for trace in each.text.split(_TRACEBACK)[1:]:
            if any(word in trace.lower() for word in BROKEN):
                continue
            last = trace.strip().splitlines()[-1]
            raise Failure(f"rank {each.rank} printed a traceback in start {each.start}: {last[:200]}")


def check_said(printed: Sequence[Printed], patterns: Sequence[str]) -> None:
    """Check that causes were said.

    Raises:
        Failure: one was not, by any rank.
    """
    for pattern in patterns:
        if not any(re.search(pattern, each.text) for each in printed):
            raise Failure(f"no rank said {pattern!r}")


def check_resumed(printed: Sequence[Printed], floors: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Check that each start went on from a checkpoint that was there.

    Args:
        printed: by ranks of one attempt.
        floors: newest whole checkpoint before each start; starts after the last have the same.

    Yields:
        The step that a start went on from, and its last, for each that made a step.

    Raises:
        Failure: one began anew, or from an older checkpoint.
    """
    for each in printed:
        if each.rank:
            continue
        floor = floors[min(each.start, len(floors) - 1)]
        if floor is not None and "new run in " in each.text:
            raise Failure(f"start {each.start} began anew where there was a checkpoint of step {floor}")
        found = _RESUMED.search(each.text)
        steps = steps_in(each.text)
        begun = min(steps) - 1 if steps else int(found[1]) if found else None
        if begun is not None and begun < (floor or 0):
            raise Failure(f"start {each.start} went on from step {begun}, and there was one of step {floor}")
        if steps:
            yield min(steps) - 1, max(steps)


def passed_over(printed: Sequence[Printed]) -> tuple[str, Counter[str]]:
    """Return what starts have passed over: the lines' ends, and reasons with how often."""
    lines = [line for each in printed for line in _PASSED.findall(each.text)]
    reasons: Counter[str] = Counter()
    for line in lines:
        for reason in line.split("; "):
            reason = re.sub(r"^iter_\d+: ", "", reason)
            reason = re.sub(r"^\S+\.(distcp|pt|metadata)|^\.metadata", "FILE", reason)
            reasons[re.sub(r"\d+", "N", reason)] += 1
    return "\n".join(lines), reasons


def check_results(run: Path, unbroken: Path) -> None:
    """Compare a finished run with the unbroken one, bitwise: figures of all steps, tensors at the end.

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
