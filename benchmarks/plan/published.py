"""Plans of published training runs, compared with their published times and memory.

``python -m benchmarks plan --published`` plans the runs of ``published.json`` and writes the tables into
``docs/design/planner.md``. To add a run, add a record to the JSON; its ``fields`` explain the keys.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import figures
from mindspeed_dsa.tools.planner import arguments, devices, plan
from mindspeed_dsa.tools.planner.memory import GIB
from mindspeed_dsa.tools.planner.plan import Plan

RECORDS = Path(__file__).with_name("published.json")
PAGE = Path(__file__).parents[2] / "docs/design/planner.md"
BEGIN, END = "<!-- published:begin -->\n", "<!-- published:end -->"
_PRECISION_AWARE = "--use-precision-aware-optimizer"
_HALF_MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
_COLUMNS = (
    *("Run", "Model", "Devices, layout, sequence x global / micro batch", "Settings"),
    *("Published [s]", "Planned [s]", "Ratio", "Memory [GiB]"),
)
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A published run and its plan.

    Attributes:
        record: record of the JSON file.
        plan: plan of the run's command.
    """

    record: Record
    plan: Plan

    @property
    def planned(self) -> float:
        """Planned seconds of a step."""
        rounds: int = self.record["plan"]["rounds"]
        return rounds * self.plan.time.total

    @property
    def published(self) -> float:
        """Published seconds of a step."""
        return float(self.record["published"]["step_s"])

    @property
    def ratio(self) -> float:
        """Planned time over published time."""
        return self.planned / self.published

    @property
    def near(self) -> bool:
        """Whether the two times differ by at most the factor :data:`plan.SPREAD`."""
        return 1 / plan.SPREAD <= self.ratio <= plan.SPREAD

    @property
    def fits(self) -> bool:
        """Whether the plan lets the job run, as the published one did."""
        return self.plan.verdict != plan.TOO_LARGE

    @property
    def memory(self) -> float:
        """Planned GiB of the fullest rank, of the kind that was published; allocated if none was."""
        kind = self.record["published_memory_kind"]
        if "device" in kind:
            return self.plan.worst.total / GIB + self.plan.device.reserve
        return (self.plan.worst.total if "reserved" in kind else self.plan.worst.allocated) / GIB

    @property
    def outside(self) -> list[str]:
        """Properties of the job that plans do not cover."""
        return list(self.record.get("outside", []))


@dataclass(frozen=True)
class Nearness:
    """Figures of several runs.

    Attributes:
        runs: number of runs.
        near: number of runs within the factor :data:`plan.SPREAD`.
        typical: exp of the mean of |ln(planned / published)|.
        median: median of planned over published time.
    """

    runs: int
    near: int
    typical: float
    median: float


def records(file: Path = RECORDS) -> list[dict[str, Any]]:
    """Return the records of a file."""
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["runs"]
    return found


def flags_of(record: Record) -> list[str]:
    """Return the flags of the record's plan, and flags for other facts that the record states."""
    graphs = [word for word in record["graphs"].replace(",", " ").split() if word != "none"]
    stated = [
        ("--moe-router-force-load-balancing" if record["routing"].startswith(("forced", "faked")) else ""),
        "--overlap-moe-expert-parallel-comm" if "EP overlap" in record["overlap"] else "",
        "--tp-comm-overlap" if "tp-comm-overlap" in record["overlap"] else "",
        _PRECISION_AWARE if "precision-aware" in record["optimizer"] else "",
        _HALF_MOMENTS if "bf16 moments" in record["optimizer"] else "",
    ]
    if record["dispatcher"] in ("deepep", "hybridep"):
        stated.append(f"--moe-flex-dispatcher-backend {record['dispatcher']}")
    if graphs:
        stated.append(f"--cuda-graph-impl transformer_engine --cuda-graph-modules {' '.join(graphs)}")
    flags: str = record["plan"]["flags"]
    # A flag that the record's plan has is not given twice.
    more = [each for each in stated if each and each.split()[0] not in flags.split()]
    return shlex.split(" ".join([flags, *more]))


def command(record: Record) -> str:
    """Return the command that plans a record."""
    figures = {"devices": record["devices"], **_device(record)}
    options = [word for name, value in figures.items() for word in (f"--{name}", str(value))]
    if record["plan"]["config"]:
        options += ["--config", record["plan"]["config"]]
    words = shlex.join([*options, "--", "pretrain_gpt.py", *flags_of(record)])
    return f"python -m mindspeed_dsa plan {words}"


def _device(record: Record) -> dict[str, Any]:
    """Return the options of ``plan`` for a record's device."""
    figures = dict(record["plan"]["device"])
    return {"device": figures.pop("device"), **{f"device-{name}": value for name, value in figures.items()}}


def planned(found: Iterable[Record]) -> list[Run]:
    """Plan all records that have a plan, in their order."""
    return [_planned(record) for record in found if record["plan"]]


def _planned(record: Record) -> Run:
    figures = dict(record["plan"]["device"])
    device = devices.device(figures.pop("device"), **figures)
    words = ["pretrain_gpt.py", *flags_of(record)]
    job = arguments.job_of(words, record["devices"], record["plan"]["config"])
    if record["routing"].startswith("faked"):  # no flag of Megatron routes so
        job = replace(job, model=replace(job.model, neighbours=True))
    return Run(record, plan.make(job, device))


def nearness(runs: Sequence[Run]) -> Nearness:
    """Return the figures of at least one run."""
    apart = [abs(math.log(run.ratio)) for run in runs]
    return Nearness(
        runs=len(runs),
        near=sum(run.near for run in runs),
        typical=math.exp(statistics.fmean(apart)),
        median=statistics.median(run.ratio for run in runs),
    )


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return runs by the title of their row, without empty groups.

    Constants are chosen on the first half of the runs of quality A, and checked on the second half.
    """
    good = of_quality(runs, "A")
    by_title = {
        "quality A": good,
        "quality A, first half": good[::2],
        "quality A, second half": good[1::2],
        "quality A, without the kinds below": [run for run in good if not run.outside],
        "quality B": of_quality(runs, "B"),
    }
    return {title: own for title, own in by_title.items() if own}


def of_quality(runs: Iterable[Run], quality: str) -> list[Run]:
    """Return the runs of one quality, in their order."""
    return [run for run in runs if run.record["quality"] == quality]


def tables(found: Sequence[Record]) -> str:
    """Return the generated part of the page."""
    runs = planned(found)
    parts = [_summary(runs), _outside(runs), _table(runs), _sources(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(runs: Sequence[Run]) -> str:
    lines = [
        "| Runs | Number | Within 25 % | Typical factor | Median of planned / published |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for title, own in groups(runs).items():
        figures = nearness(own)
        lines.append(
            f"| {title} | {figures.runs} | {figures.near} | {figures.typical:.2f} | {figures.median:.2f} |"
        )
    refused = [f"`{run.record['id']}`" for run in runs if not run.fits]
    said = f"Plans of {len(refused)} of these {len(runs)} jobs do not fit: {', '.join(refused)}."
    return "\n".join([*lines, "", said if refused else f"The plans of all {len(runs)} jobs fit."])


def _outside(runs: Sequence[Run]) -> str:
    kinds = dict.fromkeys(kind for run in runs for kind in run.outside)
    if not kinds:
        return ""
    lines = ["| Kind of job | Runs | Published / planned |", "| --- | --- | --- |"]
    for kind in kinds:
        own = [run for run in runs if kind in run.outside]
        names = ", ".join(f"`{run.record['id']}`" for run in own)
        lines.append(f"| {kind} | {names} | {', '.join(f'{1 / run.ratio:.2f}' for run in own)} |")
    return "\n".join(lines)


def _table(runs: Sequence[Run]) -> str:
    lines = [
        f"| {' | '.join(_COLUMNS)} |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    lines += [f"| {' | '.join(_cells(run))} |" for run in runs]
    return "\n".join(lines)


def _cells(run: Run) -> list[str]:
    record = run.record
    layout = " ".join(
        f"{name.upper()}{size}"
        for name, size in record["layout"].items()
        if size > 1 and name in ("tp", "pp", "vpp", "ep", "cp")
    )
    step = f"{record['sequence']} x {record['global_batch']} / {record['micro_batch']}"
    recompute = record["recompute"]
    settings = [
        "" if recompute in ("none", "not stated") else recompute,
        *(record[name] for name in ("dispatcher", "routing")),
        "graphs" if record["graphs"] not in ("", "none") else "",
    ]
    memory = f"{run.memory:.0f} allocated"
    if record["published_memory_gib"] is not None:
        kind = record["published_memory_kind"]
        memory = f"{record['published_memory_gib']:.0f} published, {run.memory:.0f} planned, {kind}"
    if not run.fits:
        memory += ", does NOT fit"
    return [
        f"`{record['id']}` {record['quality']}",
        record["model"],
        f"{record['devices']} {record['plan']['device']['device']}, {layout or 'DP'}, {step}",
        ", ".join(filter(None, settings)),
        _figure(run.published),
        _figure(run.planned),
        f"{run.ratio:.2f}",
        memory,
    ]


def _figure(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"


def _sources(chosen: Sequence[Record]) -> str:
    by_repository: dict[str, list[str]] = {}
    for record in chosen:
        by_repository.setdefault(record["source"]["repo"], []).append(record["id"])
    lines = [f"* {name}: {', '.join(f'`{own}`' for own in ids)}" for name, ids in by_repository.items()]
    left = [f"`{record['id']}` ({record['why_not_plannable']})" for record in chosen if not record["plan"]]
    lines = ["Sources, with paths in the JSON file:", "", *lines]
    return "\n".join([*lines, "", f"Not planned: {', '.join(left)}."] if left else lines)


def filled(text: str, block: str) -> str:
    """Return the page's text with its generated part replaced."""
    return figures.filled(text, block, BEGIN, END)


def write() -> None:
    """Write the tables into the page."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(records())), encoding="utf-8")


def run(file: str, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Plan all records, and return the figures of each group of runs.

    Args:
        file: path of a JSON file; empty for this folder's file, whose tables are written into the page.
        say: receives each run's command and figures, and the tables of another file.
    """
    chosen = records(Path(file) if file else RECORDS)
    runs = planned(chosen)
    for each in runs:
        say(f"{each.record['id']}: {command(each.record)}")
        say(f"  published {each.published:.4g} s, planned {each.planned:.4g} s, ratio {each.ratio:.3f}")
    if file:
        say(tables(chosen))
    else:
        write()
    return {title: vars(nearness(own)) for title, own in groups(runs).items()}
