"""Records of collectives for debugging hangs: each rank's started calls, by process group, with state.

Each job has its own subfolder in the folder that the user names. ``rank-00000.json`` is a complete record,
written on request. The live files are ``live-00000.json`` (the rank's identity), ``.groups`` (its process
groups), ``.calls`` (its last calls), ``.SIGTERM`` and ``.SIGUSR1`` (its stacks at these signals). They exist
while the rank runs, and remain if it is killed.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import struct
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs.files import RunError, write_atomically

FORMAT = 2
PAUSED = "no collective has started or ended"
"""Reason of a record that a rank wrote after a pause."""
_KEPT = 64
"""Number of calls kept per ring. Collectives of a group share a ring, and so do messages with the same ranks
and tag. A hanging call is among the last ones."""
_SLOT, _ERROR = 640, 120
"""Bytes of one call, and of its error message."""
_TIMES = struct.Struct("<Qdd")
"""Call number from 1, start and end in seconds since the epoch; the end is 0 until the call returns."""
_TEXT = _SLOT - _TIMES.size - _ERROR
_ANSWERS_WITHIN_S = 10.0
"""Tolerance for times of ranks' answers to one request: a few seconds, plus clock skew between machines."""
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class Call:
    """One call of a collective, or of a point-to-point send or receive (a message).

    Attributes:
        function: function of ``torch.distributed``.
        number: position among the collectives that the rank has started in this group, from 1; for a message,
            position among the messages with the same ranks and tag.
        tensors: shapes and dtypes of the tensor arguments.
        name: purpose of the call; empty if it was not named.
        line: source line of the call.
        started: start time in seconds since the epoch.
        returned: end time of the call, or ``None``; an asynchronous operation may still be running.
        waits: whether the call itself waits for the other ranks.
        error: error message of a failed call.
        source, destination: global ranks of a message; -1 for any rank.
        tag: tag of a message.
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

    @property
    def key(self) -> str:
        """Return the ranks and the tag of a message; empty for a collective."""
        return "" if self.source is None else f"{self.source}>{self.destination}#{self.tag}"


@dataclass(frozen=True)
class Group:
    """Process group, as seen by one of its ranks.

    Attributes:
        name: torch's name of the group, equal on all its ranks.
        kinds: Megatron's names such as ``TP``; empty for other groups.
        ranks: global ranks.
        collectives: number of collectives that this rank has started.
        messages: dict from ``source>destination#tag`` to the number of sends and receives that this rank has
            started.
        calls: last collectives and messages, in order.
    """

    name: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    collectives: int = 0
    messages: dict[str, int] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()

    @property
    def title(self) -> str:
        """Return the group's names and ranks for messages."""
        ranks = ", ".join(map(str, self.ranks))
        return f"{' = '.join(self.kinds) or 'group ' + self.name} of ranks {ranks}"


@dataclass(frozen=True)
class Record:
    """Record of the collectives and messages that one rank has started.

    Attributes:
        job: identifier shared by all ranks of the job.
        rank, ranks: global rank, and number of ranks.
        host, pid: host name and process id.
        time: time of writing, in seconds since the epoch.
        reason: reason for writing; empty if only the live files with the last calls exist.
        place: position in the pipeline schedule; empty outside of forward and backward passes.
        stacks: dict from thread name to Python source lines, from the outermost call to the innermost.
        groups: process groups that the rank has used.
        torch: file of torch's flight recorder in the same folder; empty if there is none.
        went_on: time of the rank's last call after the record, in seconds since the epoch; 0 without one.
    """

    job: str
    rank: int
    ranks: int
    host: str
    pid: int
    time: float
    reason: str
    place: str
    stacks: dict[str, list[str]]
    groups: tuple[Group, ...] = ()
    torch: str = ""
    went_on: float = 0.0
    format: int = field(default=FORMAT)


class Calls:
    """File with ring buffers of a rank's last calls, updated when calls start and end.

    Args:
        path: file to write.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        # Close with the last reference. Closing earlier would let a late end of a call write into the next
        # file with the same descriptor.
        weakref.finalize(self, os.close, self._file).atexit = False

    def clear(self, ring: int) -> None:
        """Clear a ring, which has room for 64 calls."""
        size = _KEPT * _SLOT
        os.pwrite(self._file, bytes(size), ring * size)

    def start(self, ring: int, number: int, started: float, text: bytes) -> int:
        """Write the start of a call; return its offset in the file.

        Args:
            ring: index of the ring.
            number: position of the call in the ring's sequence, from 1.
            started: start time in seconds since the epoch.
            text: result of :func:`in_words`.
        """
        # With 64 slots per ring, calls 1 and 65 share a slot: offset 640 in ring 0.
        place = (ring * _KEPT + number % _KEPT) * _SLOT
        os.pwrite(self._file, _TIMES.pack(number, started, 0.0) + bytes(_ERROR) + text, place)
        return place

    def end(self, place: int, returned: float, error: str) -> None:
        """Write the end time and error of the call whose record is at offset ``place`` of the file."""
        # The end is the last 8 of the slot's first 24 bytes: number, start, end.
        os.pwrite(self._file, struct.pack("<d", returned), place + _TIMES.size - 8)
        if error:
            os.pwrite(self._file, error.encode(errors="replace")[:_ERROR], place + _TIMES.size)


def in_words(
    group: str,
    function: str,
    tensors: tuple[str, ...],
    waits: bool,
    source: int | None,
    destination: int | None,
    tag: int,
    name: str,
    line: str,
) -> bytes:
    """Return a call's fields as JSON for :meth:`Calls.start`, truncated to a fixed size."""
    rest: list[Any] = [group, function, waits, source, destination, tag]
    # Try full fields, then two tensors, then no tensors and short names.
    for cut, several in ((160, tensors), (160, tensors[:2]), (50, ())):
        fields = [*rest, name[:cut], line[-cut:], *several]
        text = json.dumps(fields, ensure_ascii=False).encode(errors="replace")
        if len(text) <= _TEXT:
            break
    return text[:_TEXT].ljust(_TEXT, b"\0")


def with_calls(groups: Sequence[Group], file: Path) -> tuple[Group, ...]:
    """Return groups with their calls and counts, read from a file of :class:`Calls`."""
    by_group: dict[str, list[Call]] = {}
    data = file.read_bytes() if file.exists() else b""
    for base in range(0, len(data) - _SLOT + 1, _SLOT):
        number, started, returned = _TIMES.unpack_from(data, base)
        error, text = (
            data[base + begin : base + end].rstrip(b"\0").decode(errors="replace")
            for begin, end in ((_TIMES.size, _SLOT - _TEXT), (_SLOT - _TEXT, _SLOT))
        )
        try:
            group, function, waits, source, destination, tag, name, line, *tensors = json.loads(text or "[]")
        except (ValueError, TypeError):  # a slot that is empty or half written
            continue
        more = (started, returned or None, waits, error, source, destination, tag)
        by_group.setdefault(group, []).append(Call(function, number, tuple(tensors), name, line, *more))
    filled = []
    for group in groups:
        calls = sorted(by_group.get(group.name, ()), key=lambda call: call.started)
        counts: dict[str, int] = {}
        for call in calls:
            # Calls are numbered from 1, so the largest number is the count.
            counts[call.key] = max(counts.get(call.key, 0), call.number)
        filled.append(replace(group, collectives=counts.pop("", 0), messages=counts, calls=tuple(calls)))
    return tuple(filled)


def list_group(live: Path, group: Group) -> None:
    """Append a group, without its calls, to a rank's ``.groups`` file."""
    _append(live, {"name": group.name, "kinds": group.kinds, "ranks": group.ranks})


def strike_group(live: Path, name: str) -> None:
    """Mark a group as destroyed in a rank's ``.groups`` file."""
    _append(live, {"gone": name})


def _append(live: Path, line: dict[str, Any]) -> None:
    with open(live.with_suffix(".groups"), "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _listed(live: Path) -> list[Group]:
    file, groups = live.with_suffix(".groups"), dict[str, Group]()
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            data = json.loads(line)
            if "gone" in data:
                groups.pop(data["gone"], None)
            else:
                groups[data["name"]] = Group(data["name"], tuple(data["kinds"]), tuple(data["ranks"]))
        except (ValueError, KeyError, TypeError):  # an unfinished last line
            continue
    return list(groups.values())


def record_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's record in the folder of its job."""
    return folder / f"rank-{rank:05d}.json"


def live_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's ``live-*.json``; its other live files differ in the suffix."""
    return folder / f"live-{rank:05d}.json"


def write(file: Path, record: Record) -> None:
    """Write a record atomically."""
    write_atomically(file, json.dumps(asdict(record)))


def read(folder: Path) -> list[Record]:
    """Read the records of all ranks of the newest job, preferring jobs with a written record.

    Raises:
        RunError: there is no record, or one is damaged.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder; name the one that was given to --record-collectives")
    newest: list[Record] = []
    # Names of job folders start with the time: newest first.
    for job in [folder, *sorted((child for child in folder.iterdir() if child.is_dir()), reverse=True)]:
        records = _of_job(job)
        if any(each.reason for each in records):
            return records
        newest = newest or records
    if not newest:
        raise RunError(
            f"{folder} has no record of a rank (rank-00000.json and so on); train with --record-collectives "
            f"{folder}, and send SIGUSR1 to one of the job's ranks while it hangs"
        )
    # Without any written record, take the live files of the newest job.
    return newest


def _of_job(folder: Path) -> list[Record]:
    """Return one record per rank: the written one, or one from the live files if the rank has gone on."""
    live = {record.rank: record for record in map(_live, folder.glob("live-*.json"))}
    stacks = {rank: _at_sigterm(folder, rank) for rank in live}
    written = {record.rank: record for record in map(_load, folder.glob("rank-*.json"))}
    ends = [time for time, _ in stacks.values()]
    # A rank that wrote before the last request, or before others were ended, did not answer it.
    asked = max([record.time for record in written.values()] + ends, default=0.0) - _ANSWERS_WITHIN_S
    return [
        _newest(written.get(rank), live.get(rank), *stacks.get(rank, (0.0, [])), asked)
        for rank in sorted({*live, *written})
    ]


def _newest(
    written: Record | None, live: Record | None, ended: float, stack: list[str], asked: float
) -> Record:
    """Return one of a rank's two records, the later one with the stack at SIGTERM if that ended the rank."""
    if written is not None:
        if live is None or live.time <= written.time:  # it has stood still since
            return written
        if ended <= written.time and asked <= written.time:
            return replace(written, went_on=live.time)
    assert live is not None
    return replace(live, reason="SIGTERM", time=ended, stacks={"main": stack}) if ended else live


def _live(file: Path) -> Record:
    """Return a rank's record from its live files, with the time of its last call."""
    record = _load(file)
    groups = with_calls(_listed(file), file.with_suffix(".calls"))
    calls = [call for group in groups for call in group.calls]
    last = max(calls, key=lambda call: call.started, default=None)
    if last is None:  # no collective yet
        return record
    place = f"{'in' if last.returned is None else 'after'} {last.name or last.function}"
    return replace(record, groups=groups, place=place, time=max(last.started, last.returned or 0.0))


def _at_sigterm(folder: Path, rank: int) -> tuple[float, list[str]]:
    """Return time and stack of a rank's last SIGTERM; 0 and nothing if there was none."""
    file = live_file(folder, rank).with_suffix(".SIGTERM")
    text = file.read_text(errors="replace") if file.exists() else ""
    if not text:
        return 0.0, []
    frames = _FRAME.findall(text.rpartition("Stack (most")[2])
    # The stack in the file has the innermost call first.
    stack = [f"{path}:{at} {name}: {linecache.getline(path, int(at)).strip()}" for path, at, name in frames]
    return file.stat().st_mtime, stack[::-1]


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
    """Convert JSON lists to tuples for tuple fields."""
    # Annotations are strings here, such as "tuple[str, ...]".
    names = {each.name for each in fields(kind) if str(each.type).startswith("tuple")}
    return {key: tuple(value) if key in names else value for key, value in data.items()}
