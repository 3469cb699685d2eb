"""Measured steps of one's own runs, from their metrics files or from JSON.

A file of measurements is the metrics file of ``--step-metrics-file``, whose job is the one that is planned.
Otherwise it is a JSON object, or a list of them, with the keys of :data:`KEYS`.
"""

from __future__ import annotations

import difflib
import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs import metrics
from mindspeed_dsa.tools.planner.job import Job
from mindspeed_dsa.tools.planner.memory import GIB

KEYS = {
    "step_s": "seconds of a step",
    "flags": "the job's command line; without it, the job is the one that is planned",
    "devices": "of the job",
    "config": "as --config",
    "memory_gib": "largest allocated GiB of a rank",
    "name": "shown in the table",
}
"""Dict from key of a JSON record to its meaning."""
WARMING = 0.2
"""Share of the steps of a metrics file that are left out at its beginning."""


@dataclass(frozen=True)
class Record:
    """A measured step.

    Attributes:
        name: name in the table.
        seconds: time of a step.
        spread: largest step time of nine in ten steps over the median; 1 if only one time is known.
        memory: GiB that the fullest rank had allocated; None if not measured.
        tokens: tokens of a step; None if not measured.
        flags: job's command line; None if the job is the one that is planned.
        devices: devices of the job.
        config: ``config.json`` with the model's sizes.
    """

    name: str
    seconds: float
    spread: float = 1.0
    memory: float | None = None
    tokens: float | None = None
    flags: tuple[str, ...] | None = None
    devices: int | None = None
    config: str | None = None


def read(file: Path) -> list[Record]:
    """Read a file of measurements.

    Raises:
        SettingsError: the file cannot be read, or a record lacks its time or has an unknown key.
    """
    try:
        if file.suffix == ".jsonl":
            return [_of_metrics(file, metrics.read(file))]
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(file, f"it cannot be read ({error})") from error
    records = content if isinstance(content, list) else [content]
    if not records:
        raise _refused(file, "it has no records")
    return [_of_json(file, number, record) for number, record in enumerate(records, start=1)]


def _refused(file: Path, why: str) -> SettingsError:
    keys = ", ".join(KEYS)
    return SettingsError(
        f"mindspeed_dsa plan: --measured {file}: {why}. Give a metrics.jsonl of --step-metrics-file, or "
        f"a JSON object, or a list of them, with the keys {keys}; only step_s is required"
    )


def _of_metrics(file: Path, records: Sequence[metrics.Record]) -> Record:
    """Return the typical step of a run without its first steps, which are slower."""
    timed = [record for record in records if _positive(record.get("step_time_s"))]
    timed = timed[int(WARMING * len(timed)) :]
    if not timed:
        raise _refused(file, "no record has a step_time_s")
    _, peaks = metrics.points(records, "peak_memory_bytes")
    seconds = sorted(record["step_time_s"] for record in timed)
    typical, slow = statistics.median(seconds), seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))]
    rates = [record for record in timed if _positive(record.get("tokens_per_s"))]
    return Record(
        name=file.name,
        seconds=typical,
        spread=slow / typical,
        memory=max(peaks) / GIB if peaks else None,
        tokens=rates[-1]["tokens_per_s"] * rates[-1]["step_time_s"] if rates else None,
    )


def _positive(value: Any) -> bool:
    return metrics.is_number(value) and 0 < value < math.inf


def _of_json(file: Path, number: int, content: Any) -> Record:
    if not isinstance(content, dict):
        raise _refused(file, f"record {number} is no object")
    for key in content.keys() - KEYS.keys():
        near = difflib.get_close_matches(key, KEYS, n=1)
        raise _refused(file, f"record {number} has {key!r}{f', meant is {near[0]}' if near else ''}")
    for key in ("step_s", "memory_gib", "devices"):
        value = content.get(key)
        if not (_positive(value) or (value is None and key != "step_s")):
            raise _refused(file, f"record {number} needs a number above 0 as {key}, not {value!r}")
    flags = content.get("flags")
    if flags is not None:
        if not content.get("devices"):
            raise _refused(file, f"record {number} has flags, and no devices")
        flags = tuple(shlex.split(flags) if isinstance(flags, str) else map(str, flags))
    return Record(
        name=str(content.get("name", f"record {number}")),
        seconds=content["step_s"],
        memory=content.get("memory_gib"),
        flags=flags,
        devices=content.get("devices"),
        config=content.get("config"),
    )


def same_job(record: Record, job: Job, devices: int | None) -> Job:
    """Return the planned job, if the record can be of it.

    Raises:
        SettingsError: the number of devices is not given, or the steps have other numbers of tokens.
    """
    if devices is None:
        raise SettingsError(
            f"mindspeed_dsa plan: --measured {record.name}: give --devices, the number of devices of the run"
        )
    tokens = job.training.batch * job.training.sequence
    if record.tokens is not None and not math.isclose(record.tokens, tokens, rel_tol=0.01):
        raise SettingsError(
            f"mindspeed_dsa plan: --measured {record.name}: its steps have {record.tokens:,.0f} tokens, and "
            f"those of the flags {tokens:,}; give the flags of the run, or a JSON record that has them"
        )
    return job
