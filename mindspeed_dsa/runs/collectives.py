"""Records of collectives, one file per rank: what it has started, in which group, and where it stands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs.files import RunError, write_atomically

FORMAT = 1
_FILES = "rank-*.json"


@dataclass(frozen=True)
class Call:
    """One collective, or one message to or from a rank.

    Attributes:
        function: of ``torch.distributed``.
        number: among the collectives that the rank has started in this group, from 1; of a message, among
            those with the same ranks and tag.
        tensors: shapes and dtypes of what it was called with.
        name: what it is for, in words; empty if nobody said.
        line: that called it.
        started: seconds since the epoch.
        returned: the same, once the call is over; an asynchronous one may be on its way then.
        waits: whether the call itself waits for the others.
        error: that it ended with.
        source, destination: global ranks of a message; -1 for any.
        tag: of a message.
    """

    function: str
    number: int
    tensors: tuple[str, ...]
    name: str
    line: str
    started: float
    returned: float | None
    waits: bool
    error: str = ""
    source: int | None = None
    destination: int | None = None
    tag: int = 0


@dataclass(frozen=True)
class Group:
    """A process group, as one of its ranks sees it.

    Attributes:
        name: torch's, equal on all its ranks.
        kinds: Megatron's names, such as ``TP``; empty for a group that it does not know.
        ranks: global ones.
        collectives: how many this rank has started.
        messages: how many it has sent or is to receive, by ``source>destination#tag``.
        calls: the last of both, in order.
    """

    name: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    collectives: int
    messages: dict[str, int]
    calls: tuple[Call, ...]

    @property
    def title(self) -> str:
        """Return it in words."""
        ranks = ", ".join(map(str, self.ranks))
        return f"{' = '.join(self.kinds) or 'group ' + self.name} of ranks {ranks}"


@dataclass(frozen=True)
class Record:
    """Everything that one rank wrote.

    Attributes:
        job: equal on all ranks of a job, and on no other's.
        rank, ranks: this one, and how many there are.
        host, pid: where it runs.
        time: of writing, in seconds since the epoch.
        reason: it was written for.
        lost: in words, what became of ranks that ended unasked, by rank.
        place: in the schedule; empty between forwards and backwards.
        stacks: by thread, lines of Python from the outermost call to the innermost.
        groups: that it has used.
        torch: file of torch's own recorder beside this one; empty without.
    """

    job: str
    rank: int
    ranks: int
    host: str
    pid: int
    time: float
    reason: str
    lost: dict[str, str]
    place: str
    stacks: dict[str, list[str]]
    groups: tuple[Group, ...]
    torch: str = ""
    format: int = field(default=FORMAT)


def write(folder: Path, record: Record) -> Path:
    """Write a rank's file, in one step."""
    file = folder / f"rank-{record.rank:05d}.json"
    write_atomically(file, json.dumps(asdict(record)))
    return file


def read(folder: Path) -> list[Record]:
    """Read the files of all ranks that wrote one, in their order.

    Raises:
        RunError: there is none, one is damaged, or they are of two jobs.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder; name the one that was given to --record-collectives")
    files = sorted(folder.glob(_FILES))
    if not files:
        raise RunError(
            f"{folder} has no record of a rank (rank-00000.json and so on); train with --record-collectives "
            f"{folder}, and send SIGUSR1 to one of the job's ranks while it hangs"
        )
    records = [_load(file) for file in files]
    jobs: dict[str, list[int]] = {}
    for record in records:
        jobs.setdefault(record.job, []).append(record.rank)
    if len(jobs) > 1:
        newest = max(records, key=lambda each: each.time).job
        older = [rank for job, ranks in jobs.items() if job != newest for rank in ranks]
        raise RunError(
            f"{folder} holds records of {len(jobs)} jobs; remove those of the earlier, "
            f"{_numbers([f'rank-{rank:05d}.json' for rank in sorted(older)])}, or name the folder of one job"
        )
    return sorted(records, key=lambda each: each.rank)


def _numbers(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _load(file: Path) -> Record:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']}, this release reads {FORMAT}")
        data["groups"] = tuple(_group(each) for each in data["groups"])
        record = Record(**data)
        if not all(isinstance(each, int) for each in (record.rank, record.ranks)):
            raise ValueError("ranks are numbers")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{file} is cut short or no record of collectives ({error}); copy it again, or remove it: the "
            "others are read without it"
        ) from None
    return record


def _group(data: dict[str, Any]) -> Group:
    calls = tuple(_call(each) for each in data.pop("calls"))
    return Group(**_tuples(Group, data), calls=calls)


def _call(data: dict[str, Any]) -> Call:
    return Call(**_tuples(Call, data))


def _tuples(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """Turn lists of JSON into the tuples that fields are."""
    names = {each.name for each in fields(kind) if str(each.type).startswith("tuple")}
    return {key: tuple(value) if key in names else value for key, value in data.items()}
