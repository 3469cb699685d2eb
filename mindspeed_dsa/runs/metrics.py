"""Metrics of a run by step: a file with one JSON object per line.

``--step-metrics-file`` writes it for Megatron-LM's training loop, and ``python -m mindspeed_dsa compare``
reads it. A step's record has ``step``, ``lm_loss`` and ``indexer_loss`` (nats per token), ``grad_norm``,
``tokens_per_s``, ``step_time_s`` and ``peak_memory_bytes``; what a job does not measure is absent or null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs.files import write_atomically

FILE = "metrics.jsonl"
Record = Mapping[str, Any]


def append(path: Path, record: Record) -> None:
    """Add one record; a killed process leaves complete lines and at most one unfinished at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[Record]:
    """Records by step; if a step was repeated after a resume, the later record.

    Raises:
        ValueError: a line is not a record.
    """
    found: dict[int, Record] = {}
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = json.loads(text)
            found[int(record["step"])] = record
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: not a record of a step ({error!r}); the job must write one JSON "
                "object per line into that file, and nothing else"
            ) from None
    return [found[step] for step in sorted(found)]


def truncate(path: Path, step: int, required: Sequence[str]) -> tuple[list[Record], str]:
    """Prepare a file for a run that resumes after ``step``: drop the records of later steps and broken lines.

    Args:
        path: the file; it need not exist.
        step: last step to keep.
        required: what a record must hold as a number besides its step.

    Returns:
        The records kept; and a warning if more is broken than the last line, which a killed process leaves
        unfinished. The original file is then kept as ``NAME.damaged``.
    """
    if not path.exists():
        return [], ""
    content = path.read_bytes()
    lines = content.splitlines()
    records = [_parse(text, required) for text in lines]
    broken = [number for number, record in enumerate(records, start=1) if record is None]
    warning = ""
    if broken and broken != [len(lines)]:
        aside = path.with_name(f"{path.name}.damaged")
        aside.write_bytes(content)
        warning = (
            f"{path} is damaged: {len(broken)} of its {len(lines)} lines, first line {broken[0]}, are not "
            f"records of steps; the run continues without them, and the original is kept as {aside.name}"
        )
    kept = [record for record in records if record is not None and record["step"] <= step]
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept, warning


def is_number(value: Any) -> bool:
    """Whether a figure of a record is a number; NaN and infinity are."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _parse(text: bytes, required: Sequence[str]) -> Record | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and all(is_number(record.get(name)) for name in ("step", *required))
    return record if whole else None
