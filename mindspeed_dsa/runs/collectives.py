"""Records of collectives, one file per rank: what it has started, in which group, and where it stands.

Each job has a folder of its own in the one that the user names. ``rank-00000.json`` is a whole record,
written for a reason. ``live-00000.json``, ``.groups``, ``.calls`` and ``.SIGTERM`` are there while the rank
runs, and stay where it is killed: who it is, its groups, its last calls, and the stack that the signal met.
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
_KEPT = 64
"""Calls of a kind in a group: collectives, or messages with the same ranks and tag; what hangs is one of the
last."""
_SLOT, _ERROR = 640, 120
"""Bytes of a call, and of the error that it ended with."""
_TIMES = struct.Struct("<Qdd")
"""Number from 1, start and end in seconds since the epoch; the last is 0 while the call is not over."""
_TEXT = _SLOT - _TIMES.size - _ERROR
_ANSWERS_WITHIN_S = 10.0
"""Ranks answer each other within two or three seconds; more is a clock of another machine."""
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


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

    @property
    def key(self) -> str:
        """Return the ranks and the tag of a message; empty for a collective."""
        return "" if self.source is None else f"{self.source}>{self.destination}#{self.tag}"


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
    collectives: int = 0
    messages: dict[str, int] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()

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
        reason: it was written for; empty where nobody wrote it, and only the last calls are known.
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
    place: str
    stacks: dict[str, list[str]]
    groups: tuple[Group, ...] = ()
    torch: str = ""
    format: int = field(default=FORMAT)


class Calls:
    """File of a rank's last calls, written as they start and end.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        # With the last who writes: else a call that ends late writes into the next file of that number.
        weakref.finalize(self, os.close, self._file).atexit = False

    def clear(self, ring: int) -> None:
        """Empty a ring, the room of so many calls."""
        size = _KEPT * _SLOT
        os.pwrite(self._file, bytes(size), ring * size)

    def start(self, ring: int, number: int, started: float, text: bytes) -> int:
        """Write that a call has started; return its place.

        Args:
            ring: that it goes to.
            number: of it among those in the ring, from 1.
            started: seconds since the epoch.
            text: of :func:`in_words`.
        """
        place = (ring * _KEPT + number % _KEPT) * _SLOT
        os.pwrite(self._file, _TIMES.pack(number, started, 0.0) + bytes(_ERROR) + text, place)
        return place

    def end(self, place: int, returned: float, error: str) -> None:
        """Write that the call at a place is over."""
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
    """Return what :meth:`Calls.start` writes of a call: as much as has room, the fields of :class:`Call`."""
    rest: list[Any] = [group, function, waits, source, destination, tag]
    for cut, several in ((160, tensors), (160, tensors[:2]), (50, ())):
        fields = [*rest, name[:cut], line[-cut:], *several]
        text = json.dumps(fields, ensure_ascii=False).encode(errors="replace")
        if len(text) <= _TEXT:
            break
    return text[:_TEXT].ljust(_TEXT, b"\0")


def with_calls(groups: Sequence[Group], file: Path) -> tuple[Group, ...]:
    """Return groups with the calls that a file of :class:`Calls` has of them."""
    found: dict[str, list[Call]] = {}
    data = file.read_bytes() if file.exists() else b""
    for at in range(0, len(data) - _SLOT + 1, _SLOT):
        number, started, returned = _TIMES.unpack_from(data, at)
        error, text = (
            data[at + begin : at + end].rstrip(b"\0").decode(errors="replace")
            for begin, end in ((_TIMES.size, _SLOT - _TEXT), (_SLOT - _TEXT, _SLOT))
        )
        try:
            group, function, waits, source, destination, tag, name, line, *tensors = json.loads(text or "[]")
        except (ValueError, TypeError):  # half written, or never
            continue
        more = (started, returned or None, waits, error, source, destination, tag)
        found.setdefault(group, []).append(Call(function, number, tuple(tensors), name, line, *more))
    filled = []
    for group in groups:
        calls = sorted(found.get(group.name, ()), key=lambda call: call.started)
        counts: dict[str, int] = {}
        for call in calls:
            counts[call.key] = max(counts.get(call.key, 0), call.number)
        filled.append(replace(group, collectives=counts.pop("", 0), messages=counts, calls=tuple(calls)))
    return tuple(filled)


def list_group(live: Path, group: Group) -> None:
    """Add a group, without its calls, to those of a rank."""
    _append(live, {"name": group.name, "kinds": group.kinds, "ranks": group.ranks})


def strike_group(live: Path, name: str) -> None:
    """Take a group that is destroyed from those of a rank."""
    _append(live, {"gone": name})


def _append(live: Path, line: dict[str, Any]) -> None:
    with open(live.with_suffix(".groups"), "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _listed(live: Path) -> list[Group]:
    file, found = live.with_suffix(".groups"), dict[str, Group]()
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            data = json.loads(line)
            if "gone" in data:
                found.pop(data["gone"], None)
            else:
                found[data["name"]] = Group(data["name"], tuple(data["kinds"]), tuple(data["ranks"]))
        except (ValueError, KeyError, TypeError):  # the last line, cut short
            continue
    return list(found.values())


def record_file(folder: Path, rank: int) -> Path:
    """Return where a rank's record lies in the folder of its job."""
    return folder / f"rank-{rank:05d}.json"


def live_file(folder: Path, rank: int) -> Path:
    """Return where it is said who a rank is; its groups, calls and stacks lie beside that."""
    return folder / f"live-{rank:05d}.json"


def write(file: Path, record: Record) -> None:
    """Write a record, in one step."""
    write_atomically(file, json.dumps(asdict(record)))


def read(folder: Path) -> list[Record]:
    """Read what all ranks of a job left, in their order: of the newest in a folder that wrote a record.

    Raises:
        RunError: there is none, or one is damaged.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder; name the one that was given to --record-collectives")
    jobs = [folder, *sorted((each for each in folder.iterdir() if each.is_dir()), reverse=True)]
    found = [records for each in jobs if (records := _of_job(each))]
    if not found:
        raise RunError(
            f"{folder} has no record of a rank (rank-00000.json and so on); train with --record-collectives "
            f"{folder}, and send SIGUSR1 to one of the job's ranks while it hangs"
        )
    return next((records for records in found if any(each.reason for each in records)), found[0])


def _of_job(folder: Path) -> list[Record]:
    """Return a record of each rank: its own, unless it went on and did not answer the next time."""
    found = {record.rank: record for record in map(_live, folder.glob("live-*.json"))}
    written = [_load(file) for file in folder.glob("rank-*.json")]
    asked = max((record.time for record in written), default=0.0) - _ANSWERS_WITHIN_S
    for record in written:
        later = found.get(record.rank)
        if later is None or later.time <= record.time or asked <= record.time:
            found[record.rank] = record
    return [found[rank] if found[rank].reason else _ended(folder, found[rank]) for rank in sorted(found)]


def _live(file: Path) -> Record:
    """Return what is known of a rank that has not written, at the time of what it did last."""
    record = _load(file)
    groups = with_calls(_listed(file), file.with_suffix(".calls"))
    calls = [call for group in groups for call in group.calls]
    last = max(calls, key=lambda call: call.started, default=None)
    if last is None:
        return record
    place = f"{'in' if last.returned is None else 'after'} {last.name or last.function}"
    return replace(record, groups=groups, place=place, time=max(last.started, last.returned or 0.0))


def _ended(folder: Path, record: Record) -> Record:
    """Add the stack that SIGTERM met, if that has ended the rank."""
    file = live_file(folder, record.rank).with_suffix(".SIGTERM")
    text = file.read_text(errors="replace") if file.exists() else ""
    if not text:
        return record
    frames = _FRAME.findall(text.rpartition("Stack (most")[2])
    stack = [f"{path}:{at} {name}: {linecache.getline(path, int(at)).strip()}" for path, at, name in frames]
    return replace(record, reason="SIGTERM", time=file.stat().st_mtime, stacks={"main": stack[::-1]})


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
