"""Metrics of a run, in a file with one JSON object per step and line.

With ``--step-metrics-file`` Megatron-LM's training loop writes the file; ``python -m mindspeed_dsa compare``
reads it. A record has ``step``, ``lm_loss`` and ``indexer_loss`` (nats per token), ``grad_norm``,
``tokens_per_s``, ``step_time_s`` and ``peak_memory_bytes``. Values that a job does not measure are absent or
null.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mindspeed_dsa.log import Log
from mindspeed_dsa.runs.files import RunError, write_atomically

FILE = "metrics.jsonl"
_BLOCK = 1 << 20  # bytes per read from the end of a file
_SHOWN = 40  # maximum characters of a line in a message
Record = Mapping[str, Any]


def append(path: Path, record: Record) -> None:
    """Append one record. A killed process leaves complete lines, and at most one unfinished line at the end.

    An unfinished line from an earlier process, or from a full disk, is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a+b") as file:
            _end_line(file)
            file.write((json.dumps(record) + "\n").encode())
    except OSError as error:  # the error of a full disk lacks the file name
        raise OSError(error.errno, error.strerror, str(path)) from None


def append_or_warn(path: Path, record: Record, log: Log) -> None:
    """Append one record; if the file cannot be written, warn once and go on: training outlives its report."""
    try:
        append(path, record)
    except OSError as error:
        log.warning("%s lacks steps: %s", path, error.strerror, once=True, ranks="all")


def _end_line(file: IO[bytes]) -> None:
    """Complete or remove an unfinished last line, so that the next record starts a new line."""
    end = file.seek(0, os.SEEK_END)
    if not end or _ends_line(file, end):
        return
    tail = next(_lines_from_end(file))
    if _is_torn(tail):
        file.truncate(end - len(tail))
    else:  # a complete record, or a foreign line
        file.write(b"\n")


def _is_torn(text: bytes) -> bool:
    """Return whether an unterminated last line is an incomplete record, left by a killed process."""
    begun = text.strip(b"\0")  # after a power cut some file systems leave zeros
    if not begun.startswith(b"{"):
        return not begun
    try:
        json.loads(begun)
    except (ValueError, RecursionError):
        return True
    return begun != text


def _ends_line(file: IO[bytes], end: int) -> bool:
    file.seek(end - 1)
    return file.read(1) == b"\n"


def _lines_from_end(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines from last to first, without line ends, with one line in memory at a time."""
    position, rest = file.seek(0, os.SEEK_END), b""
    if position and _ends_line(file, position):
        position -= 1
    # Read blocks backwards; `rest` is the start of a line that may continue in the block before.
    while position:
        start = max(position - _BLOCK, 0)
        file.seek(start)
        rest = file.read(position - start) + rest
        position = start
        while (cut := rest.rfind(b"\n")) >= 0:
            yield rest[cut + 1 :]
            rest = rest[:cut]
    yield rest


def _step(text: bytes) -> tuple[int, Record] | None:
    """Return a line's step and record; ``None`` if it is not a record."""
    try:
        record = json.loads(text)
        return int(record["step"]), record
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def read(path: Path) -> list[Record]:
    """Return the records ordered by step; for steps repeated after a resume, the last record.

    An unfinished last line, left by a killed process, is ignored.

    Raises:
        ValueError: any other line is not a record.
    """
    by_step: dict[int, Record] = {}
    lines = path.read_bytes().splitlines(keepends=True)
    for number, text in enumerate(lines, start=1):
        record = _step(text)
        if record is not None:
            by_step[record[0]] = record[1]
        elif number < len(lines) or text.endswith((b"\n", b"\r")) or not _is_torn(text):
            raise ValueError(
                f"{path}, line {number}: not a record of a step ({_shown(text)}); the job must write one "
                "JSON object per line into that file, and nothing else"
            )
    return [by_step[step] for step in sorted(by_step)]


def _shown(text: bytes) -> str:
    return repr(text[:_SHOWN].decode(errors="replace")) + ("..." if len(text) > _SHOWN else "")


def latest(path: Path, count: int) -> tuple[list[Record], int]:
    """Return the last records of a file, reading it backwards and only as far as needed.

    If a run was resumed and repeated steps, the records of the last attempt are returned, without later steps
    of earlier attempts.

    Args:
        path: file of metrics.
        count: maximum number of records.

    Returns:
        Records ordered by step, and the number of invalid lines, not counting an unfinished last line.
    """
    newest: list[tuple[int, Record]] = []
    broken = 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        unfinished = bool(end) and not _ends_line(file, end)
        for number, text in enumerate(_lines_from_end(file)):
            record = _step(text)
            if record is None:  # an empty file yields one empty line, which is not broken
                broken += bool(end) and not (unfinished and number == 0 and _is_torn(text))
            # Backwards, steps decrease. A larger step is from a pass before the resume.
            elif not newest or record[0] < newest[-1][0]:
                newest.append(record)
            if len(newest) == count:
                break
    return [record for _, record in reversed(newest)], broken


def truncate(path: Path, step: int, required: Sequence[str]) -> tuple[list[Record], str]:
    """Prepare a file for a run that resumes after ``step``: remove records of later steps and broken lines.

    Args:
        path: file of metrics, which may not exist.
        step: last step to keep.
        required: keys that must be numbers in every record, in addition to ``step``.

    Returns:
        Records that were kept; and a warning, empty if at most the last line was broken (unfinished). With a
        warning, the original file is kept as ``NAME.damaged``.
    """
    if not path.exists():
        return [], ""
    content = path.read_bytes()
    lines = content.splitlines()
    records = [_parse(text, required) for text in lines]
    broken = [number for number, record in enumerate(records, start=1) if record is None]
    warning = ""
    # Only a broken last line is the normal result of a kill.
    if broken and broken != [len(lines)]:
        aside = path.with_name(f"{path.name}.damaged")
        aside.write_bytes(content)
        warning = (
            f"{path} is damaged: {len(broken)} of its {len(lines)} lines, first line {broken[0]}, are not "
            f"records of steps; the run continues without them, and the original is kept as {aside.name}"
        )
    # Later steps are trained again, and would otherwise appear twice.
    kept = [record for record in records if record is not None and record["step"] <= step]
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept, warning


def is_number(value: Any) -> bool:
    """Return whether a value of a record is a number, including NaN and infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _parse(text: bytes, required: Sequence[str]) -> Record | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and all(is_number(record.get(name)) for name in ("step", *required))
    return record if whole else None


def points(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a value for ``name``, and the values."""
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def pyplot_for_files() -> Any:
    """Return matplotlib's ``pyplot`` with a backend that draws to files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def pyplot_for(picture: Path) -> Any:
    """Call :func:`pyplot_for_files`; if matplotlib is missing, the error names the requested picture.

    Raises:
        RunError: matplotlib is not installed.
    """
    try:
        return pyplot_for_files()
    except ModuleNotFoundError:
        raise RunError(
            f"{picture} cannot be drawn: matplotlib is missing; pip install 'mindspeed_dsa[viz]'"
        ) from None


def draw(
    path: Path,
    records: Sequence[Record],
    heldout: Sequence[Record] = (),
    levels: Mapping[str, float] | None = None,
) -> None:
    """Plot the language model loss and the indexer loss over steps, with matplotlib.

    Args:
        path: picture file.
        records: records of ``metrics.jsonl``.
        heldout: records of evaluations, with ``heldout_loss``.
        levels: dict from name to a reference loss, drawn as a horizontal line.
    """
    pyplot = pyplot_for_files()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*points(records, "lm_loss"), label="training", linewidth=1)
    if heldout:
        axes.plot(*points(heldout, "heldout_loss"), marker="o", label="held-out")
    for name, loss in (levels or {}).items():
        axes.axhline(loss, linestyle="--", color="grey", linewidth=1, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    indexer = points(records, "indexer_loss")
    if indexer[0]:
        right = axes.twinx()
        right.plot(*indexer, color="tab:green", linewidth=0.8, alpha=0.7)
        right.set_ylabel("indexer loss", color="tab:green")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
